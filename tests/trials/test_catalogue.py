"""Facts of a data set before it is loaded, and where its files may lie."""

import io
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trials.engine.data import load
from trials.engine.errors import DataError
from trials.spec import DataFacts, DataSpec, SpecError, facts_for
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
    assert (facts.features, facts.shape, facts.classes) == (5 * 4 * 3, (3, 4, 5), 3)


@pytest.mark.parametrize(("image", "label"), [("img", "fine_label"), ("image", "labels")])
def test_usual_column_names_are_found(tmp_path: Path, image: str, label: str):
    write_images(tmp_path / "images", image=image, label=label)
    files = find_parquet(parquet("images"), [tmp_path])
    assert (files.image_column, files.label_column) == (image, label)


def test_absolute_path_inside_a_root_is_fine(tmp_path: Path):
    folder = write_images(tmp_path / "roots" / "images")
    assert find_parquet(parquet(str(folder)), [tmp_path / "other", tmp_path / "roots"]).train[0].parent == folder


def test_a_parquet_file_without_rows_is_no_fault_beside_one_that_has_some(tmp_path: Path):
    folder = write_images(tmp_path / "images")
    empty = pq.read_table(folder / "train-00000-of-00001.parquet").slice(0, 0)
    pq.write_table(empty, folder / "train-0.parquet")
    facts = facts_for(parquet("images"), [tmp_path])
    assert (facts.train_available, facts.shape, facts.classes) == (20, (3, 4, 5), 3)
    for split in ("test", "train"):
        pq.write_table(empty, folder / f"{split}-00000-of-00001.parquet")
        with pytest.raises(SpecError, match=f"{split}-0.*no rows"):
            facts_for(parquet("images"), [tmp_path])


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


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "synthetic"])
def test_facts_come_back_from_json_as_they_were(name: str):
    facts = facts_for(DataSpec(dataset=name), [])  # pyright: ignore[reportArgumentType]
    assert DataFacts(**json.loads(json.dumps(facts.as_json()))) == facts
    assert json.loads(json.dumps(facts.as_json())) == facts.as_json()
    assert facts.features == math.prod(facts.shape)
    assert facts.train + facts.validation == facts.train_available


def test_facts_of_earlier_studies_have_no_shape_and_are_vectors():
    assert DataFacts(100, 85, 15, 20, 64, 10).shape == (1, 1, 64)


def test_facts_of_arrays_and_folders_come_from_headers_and_names(tmp_path: Path):
    """Whatever else is damaged is not looked at: a service does not unpack a data set to size a study."""
    content = {"x_train": np.ones((9, 2, 5)), "y_train": np.arange(9) % 3, "x_test": np.ones((4, 2, 5)),
               "y_test": np.arange(4) % 3}  # fmt: skip
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        for name, array in content.items():
            stream = io.BytesIO()
            np.save(stream, array)
            archive.writestr(f"{name}.npy", stream.getvalue()[: None if name == "y_train" else 150])
    facts = facts_for(DataSpec(dataset="npz", path="set.npz"), [tmp_path])
    assert (facts.train_available, facts.test, facts.shape, facts.classes) == (9, 4, (1, 2, 5), 3)
    for place, count in (("train/one", 4), ("train/two", 3), ("test/one", 2)):
        (tmp_path / "images" / place).mkdir(parents=True)
        for number in range(count):
            (tmp_path / "images" / place / f"{number}.png").write_bytes(b"damaged")
    Image.new("RGB", (5, 4)).save(tmp_path / "images" / "train" / "one" / "0.png")
    facts = facts_for(DataSpec(dataset="images", path="images"), [tmp_path])
    assert (facts.train_available, facts.test, facts.shape, facts.classes) == (7, 2, (3, 4, 5), 2)


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
        (pa.array([0, 0, 0]), "at least two classes"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused_at_submission(tmp_path: Path, labels: pa.Array, words: str):
    folder = write_images(tmp_path / "images", train=3)
    table = pq.read_table(folder / "train-00000-of-00001.parquet")
    pq.write_table(table.set_column(1, "label", labels), folder / "train-00000-of-00001.parquet")
    with pytest.raises(SpecError, match=words):
        facts_for(parquet("images"), [tmp_path])


@pytest.mark.parametrize("mode", ["1", "P", "I;16", "CMYK"])
def test_images_of_a_mode_that_is_not_read_are_refused_at_submission(tmp_path: Path, mode: str):
    """And in the words of the loader, which would otherwise be the first to see it."""
    folder = write_images(tmp_path / "images")
    form = "TIFF" if mode == "CMYK" else "PNG"
    stream = io.BytesIO()
    Image.new(mode, (5, 4)).save(stream, form)
    rows = {"image": [{"bytes": stream.getvalue(), "path": None}] * 20, "label": [i % 3 for i in range(20)]}
    pq.write_table(pa.table(rows), folder / "train-00000-of-00001.parquet")
    for place in ("train/a", "train/b", "test/a"):
        (tmp_path / "set" / place).mkdir(parents=True)
        (tmp_path / "set" / place / f"0.{form.lower()}").write_bytes(stream.getvalue())
    for data in (parquet("images"), DataSpec(dataset="images", path="set")):
        words = f"image mode {mode} is not one of L, LA, RGB, RGBA"
        with pytest.raises(SpecError, match=words):
            facts_for(data, [tmp_path])
        with pytest.raises(DataError, match=words):
            load(data, [tmp_path], tmp_path)


@pytest.mark.parametrize("fault", ["unknown", "truncated", "link", "parquet", "second parquet", "row", "npz"])
def test_no_message_says_where_the_data_lies_on_the_server(tmp_path: Path, fault: str):
    folder = write_images(tmp_path / "images")
    whole = io.BytesIO()
    Image.new("RGB", (5, 4)).save(whole, "PNG")
    first = tmp_path / "set" / "train" / "a" / "0.png"
    for place in ("train/a", "train/b", "test/a"):
        (tmp_path / "set" / place).mkdir(parents=True)
        (tmp_path / "set" / place / "0.png").write_bytes(whole.getvalue())
    data, words = DataSpec(dataset="images", path="set"), "train/a/0.png"
    match fault:
        case "unknown":
            first.write_bytes(b"damaged")
        case "truncated":
            first.write_bytes(whole.getvalue()[:20])
        case "link":
            (tmp_path / "set" / "test" / ("x" * 200)).symlink_to("loop")
            words = "leads outside"
            (tmp_path / "set" / "test" / "loop").symlink_to("loop")
        case "parquet" | "second parquet":
            name = "train-00000-of-00001.parquet" if fault == "parquet" else "test-1.parquet"
            (folder / name).write_bytes(b"PAR1 damaged PAR1")
            data, words = parquet(str(folder)), name
        case "row":
            pq.write_table(pa.table({"image": [{"bytes": b"x"}], "label": [1]}), folder / "train-0.parquet")
            data, words = parquet(str(folder)), "train-0.parquet, row 0: the image cannot be read: its format"
        case "npz":
            (tmp_path / "set.npz").write_bytes(b"PK damaged")
            data, words = DataSpec(dataset="npz", path=str(tmp_path / "set.npz")), "set.npz"
    with pytest.raises(SpecError) as caught:
        facts_for(data, [tmp_path])
    assert words in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
