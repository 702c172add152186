"""Facts of a data set before it is loaded, and where its files may lie."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trials.spec import DataSpec, SpecError, facts_for
from trials.spec.catalogue import find_parquet, split_sizes


def write_images(folder: Path, train: int = 20, test: int = 6, image: str = "image", label: str = "label") -> Path:
    folder.mkdir(parents=True)
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (10, 20, 30)).save(buffer, "PNG")
    for split, count in (("train", train), ("test", test)):
        rows = {image: [{"bytes": buffer.getvalue(), "path": None}] * count, label: [i % 3 for i in range(count)]}
        pq.write_table(pa.table(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder


def parquet(path: str, **more) -> DataSpec:
    return DataSpec(dataset="parquet", path=path, **more)


def test_facts_come_from_the_files(tmp_path: Path):
    write_images(tmp_path / "images")
    facts = facts_for(parquet("images", validation_fraction=0.25), [tmp_path])
    assert (facts.train_available, facts.train, facts.validation, facts.test) == (20, 15, 5, 6)
    assert (facts.features, facts.classes) == (5 * 4 * 3, 3)


@pytest.mark.parametrize(("image", "label"), [("img", "fine_label"), ("image", "labels")])
def test_usual_column_names_are_found(tmp_path: Path, image: str, label: str):
    write_images(tmp_path / "images", image=image, label=label)
    files = find_parquet(parquet("images"), [tmp_path])
    assert (files.image_column, files.label_column) == (image, label)


def test_absolute_path_inside_a_root_is_fine(tmp_path: Path):
    folder = write_images(tmp_path / "roots" / "images")
    assert find_parquet(parquet(str(folder)), [tmp_path / "other", tmp_path / "roots"]).train[0].parent == folder


@pytest.mark.parametrize("path", ["../outside", "/etc", "../../etc/passwd", "missing", ".", "\0", "a" * 900])
def test_nothing_outside_the_roots(tmp_path: Path, path: str):
    write_images(tmp_path / "outside")
    (tmp_path / "root").mkdir()
    with pytest.raises(SpecError) as caught:
        find_parquet(parquet(path), [tmp_path / "root"])
    assert [i.pointer for i in caught.value.issues] == ["/data/path"]


def test_links_are_followed_before_they_are_judged(tmp_path: Path):
    outside = write_images(tmp_path / "outside")
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    with pytest.raises(SpecError, match="no folder"):
        find_parquet(parquet("folder"), [root])
    (root / "files").mkdir()
    for file in outside.iterdir():
        (root / "files" / file.name).symlink_to(file)
    with pytest.raises(SpecError, match="leads outside"):
        find_parquet(parquet("files"), [root])


def test_no_roots_no_files():
    with pytest.raises(SpecError, match="no folder"):
        find_parquet(parquet("images"), [])


def test_unusable_files_are_named(tmp_path: Path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "test.parquet").write_bytes(b"x")
    with pytest.raises(SpecError, match=r"no train\*\.parquet"):
        find_parquet(parquet("images"), [tmp_path])
    (folder / "train.parquet").write_bytes(b"not parquet")
    with pytest.raises(SpecError, match=r"train\.parquet cannot be read"):
        find_parquet(parquet("images"), [tmp_path])
    pq.write_table(pa.table({"picture": [1], "label": [0]}), folder / "train.parquet")
    with pytest.raises(SpecError, match="needs an image column"):
        find_parquet(parquet("images"), [tmp_path])
    pq.write_table(pa.table({"image": [{"bytes": b"no image"}], "label": [0]}), folder / "train.parquet")
    with pytest.raises(SpecError, match="cannot be read"):
        facts_for(parquet("images"), [tmp_path])


@pytest.mark.parametrize(("count", "fraction", "sizes"), [(100, 0.15, (85, 15)), (3, 0.1, (2, 1)), (1, 0.5, (0, 1))])
def test_validation_is_never_empty(count, fraction, sizes):
    assert split_sizes(DataSpec(dataset="digits", validation_fraction=fraction), count) == sizes


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (pa.array([0, -1, 2]), "go from -1 to 2"),
        (pa.array([0, 10**11, 2]), "at most 100000"),
        (pa.array([0.0, 1.0, 2.0]), "whole numbers, one for each image, not double"),
        (pa.array(["a", "b", "c"]), "not string"),
        (pa.array([0, None, 2]), "1 nulls"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused_at_submission(tmp_path: Path, labels: pa.Array, words: str):
    folder = write_images(tmp_path / "images", train=3)
    table = pq.read_table(folder / "train-00000-of-00001.parquet")
    pq.write_table(table.set_column(1, "label", labels), folder / "train-00000-of-00001.parquet")
    with pytest.raises(SpecError, match=words):
        facts_for(parquet("images"), [tmp_path])
