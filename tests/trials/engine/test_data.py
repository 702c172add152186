"""The loaders: what they give, how large, and what they say where the data is not what it should be."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from tests.trials.engine.data_files import encoded, random_pixels, sizes, spec
from trials.engine.data import load
from trials.engine.errors import DataError
from trials.spec import SpecError, facts_for


def write(file: Path, images: Sequence[bytes | None], labels: Any, image: str = "image", label: str = "label") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": content, "path": None} for content in images]
    pq.write_table(pa.table({image: cells, label: labels}), file, row_group_size=7)


def write_set(folder: Path, image: str = "image", label: str = "label") -> tuple[np.ndarray, np.ndarray]:
    pixels, held_out = random_pixels(40), random_pixels(12, seed=1)
    half = 20
    for name, some, start in (("train-0", pixels[:half], 0), ("train-1", pixels[half:], half), ("test", held_out, 0)):
        labels = [(start + i) % 5 for i in range(len(some))]
        write(folder / f"{name}.parquet", [encoded(p) for p in some], labels, image, label)
    return pixels, held_out


# -- digits ------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    validation=st.floats(0.01, 0.5),
    test=st.floats(0.01, 0.5),
    kept=st.none() | st.integers(2, 800),
    seed=st.integers(0, 2**31 - 1),
)
def test_sizes_are_the_catalogues(validation: float, test: float, kept: int | None, seed: int):
    wanted = spec(validation_fraction=validation, test_fraction=test, train_samples=kept, split_seed=seed)
    facts, got = facts_for(wanted, []), load(wanted, [], Path("unused"))
    assert sizes(got) == (facts.train, facts.validation, facts.test)
    assert got.train.inputs.shape[1] == facts.features
    assert got.classes == facts.classes


def test_digits_are_split_without_overlap_and_standardised_by_the_training_split():
    got = load(spec(), [], Path("unused"))
    values, labels = load_digits(return_X_y=True)
    values = np.asarray(values)
    splits = (got.train, got.validation, got.test)
    together = np.concatenate([split.inputs for split in splits]).astype(np.float64)
    # Undo the standardisation: it is one scale and one shift.
    raw = (together - together.min()) / (together.max() - together.min()) * 16
    all_labels = np.concatenate([split.labels for split in splits])
    rows = {(*np.round(row).astype(int), label) for row, label in zip(raw, all_labels, strict=True)}
    assert rows == {(*row.astype(int), label) for row, label in zip(values, np.asarray(labels), strict=True)}
    assert len(together) == len(values)
    assert abs(got.train.inputs.mean(dtype=np.float64)) < 1e-6
    assert abs(got.train.inputs.std(dtype=np.float64) - 1) < 1e-6
    for split in splits:
        assert (split.inputs.dtype, split.labels.dtype) == (np.float32, np.int64)
        assert not split.inputs.flags.writeable
        assert not split.labels.flags.writeable
        assert split.inputs.flags.c_contiguous


def test_split_seed_alone_decides_the_split():
    first = load(spec(split_seed=1), [], Path("unused"))
    np.random.seed(3)
    again = load(spec(split_seed=1), [], Path("unused"))
    other = load(spec(split_seed=2), [], Path("unused"))
    assert first.checksum == again.checksum != other.checksum
    np.testing.assert_array_equal(first.train.inputs, again.train.inputs)
    digest = hashlib.sha256()
    for split in (first.train, first.validation, first.test):
        for array in split:
            digest.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
    assert first.checksum == digest.hexdigest()


@pytest.mark.parametrize(
    ("changes", "checksum"),
    [
        ({}, "af94b070b405bb12598fd2b4f39b472061c8dc8c8c11380f3b135f8d5fa6385a"),
        (
            {"train_samples": 200, "split_seed": 7, "test_fraction": 0.3},
            "cd42db8fac61947d1bea747892ad8e5dceb68c618d91376084bd1e83fbd2d971",
        ),
    ],
)
def test_digits_stay_what_they_were(changes: dict[str, Any], checksum: str):
    """A study that goes on under a new release must see the data it began with."""
    got = load(spec(**changes), [], Path("unused"))
    assert got.checksum == checksum
    assert got.shape == facts_for(spec(**changes), []).shape == (1, 8, 8)


def test_no_training_sample_left_is_said():
    with pytest.raises(DataError, match="no training sample is left"):
        load(spec(train_samples=1), [], Path("unused"))


# -- parquet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [{}, {"image": "img", "label": "fine_label"}])
def test_parquet_images_arrive_channel_by_channel_with_their_own_labels(tmp_path: Path, columns: dict[str, str]):
    pixels, held_out = write_set(tmp_path / "set", **columns)
    wanted = spec("parquet", path="set", train_samples=21)
    facts, got = facts_for(wanted, [tmp_path]), load(wanted, [tmp_path], tmp_path)
    assert sizes(got) == (facts.train, facts.validation, facts.test) == (18, 3, 12)
    assert got.shape == facts.shape == (3, 4, 3)
    assert (got.train.inputs.shape[1], got.classes) == (facts.features, facts.classes) == (36, 5)
    order = np.random.default_rng([0, 0]).permutation(40)
    flat = pixels.transpose(0, 3, 1, 2).reshape(40, 3, -1).astype(np.float64)
    mean, deviation = (f(flat[order[3:21]], axis=(0, 2))[:, None] for f in (np.mean, np.std))
    for split, rows in ((got.train, order[3:21]), (got.validation, order[:3])):
        expected = ((flat[rows] - mean) / deviation).reshape(len(rows), -1)
        np.testing.assert_allclose(split.inputs, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(split.labels, [row % 20 % 5 for row in rows])
    test = (held_out.transpose(0, 3, 1, 2).reshape(12, 3, -1) - mean) / deviation
    np.testing.assert_allclose(got.test.inputs, test.reshape(12, -1), rtol=1e-5, atol=1e-6)


def test_jpeg_and_grey_images_and_a_constant_channel(tmp_path: Path):
    grey = np.full((10, 8, 8), 77, np.uint8)
    write(tmp_path / "train.parquet", [encoded(p, "JPEG") for p in grey], [0, 1] * 5)
    write(tmp_path / "test.parquet", [encoded(p, "JPEG") for p in grey[:4]], [0, 1] * 2)
    got = load(spec("parquet", path="."), [tmp_path], tmp_path)
    assert got.train.inputs.shape == (8, 64)
    assert not got.train.inputs.any()  # a deviation of zero is guarded


def test_only_the_images_asked_for_are_decoded(tmp_path: Path):
    """All others are damaged, and nobody notices."""
    pixels = random_pixels(40)
    kept = set(np.random.default_rng([0, 0]).permutation(40)[:10].tolist())
    images = [encoded(p) if row in kept else b"damaged" for row, p in enumerate(pixels)]
    write(tmp_path / "set" / "train.parquet", images, [i % 5 for i in range(40)])
    write(tmp_path / "set" / "test.parquet", [encoded(p) for p in pixels[:5]], list(range(5)))
    assert sizes(load(spec("parquet", path="set", train_samples=10), [tmp_path], tmp_path)) == (8, 2, 5)
    with pytest.raises(DataError, match=r"train\.parquet, row \d+: the image cannot be decoded"):
        load(spec("parquet", path="set", train_samples=40), [tmp_path], tmp_path)


def _broken(good: list[bytes]) -> dict[str, tuple[list[bytes | None], str]]:
    return {
        "corrupt": ([good[0], b"not an image", *good[2:]], r"row 1: the image cannot be decoded"),
        "truncated": ([*good[:3], good[3][:-30], *good[4:]], r"row 3: the image cannot be decoded"),
        "no bytes": ([*good[:4], None, *good[5:]], r"row 4: no image bytes"),
        "other size": ([*good[:5], encoded(random_pixels(1, (5, 3, 3))[0]), *good[6:]], r"3×5 RGB.*3×4 RGB"),
        "other mode": ([*good[:5], encoded(random_pixels(1, (4, 3))[0]), *good[6:]], r"3×4 L.*3×4 RGB"),
        "sixteen bits": ([encoded(np.zeros((4, 3), np.uint16)), *good[1:]], r"row 0: image mode I;16 is not one of"),
    }


@pytest.mark.parametrize("fault", list(_broken([b""] * 9)))
def test_images_that_are_not_what_they_should_be_are_named(tmp_path: Path, fault: str):
    good = [encoded(p) for p in random_pixels(8)]
    images, message = _broken(good)[fault]
    write(tmp_path / "test.parquet", images, [0, 1] * 4)
    write(tmp_path / "train.parquet", good, [0, 1] * 4)
    with pytest.raises(DataError, match=message) as caught:
        load(spec("parquet", path="."), [tmp_path], tmp_path)
    # Where the first test image itself is wrong it is held against the training images all the same.
    assert "test.parquet" in str(caught.value)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([0, 1, -1, 2], [0, 1], "label -1"),
        ([1, 2, 3, 1], [1, 2], "no sample of class 0"),
        ([0, 1, 3, 3], [0, 1], "no sample of class 2"),
        ([0, 1, 0, 1], [0, 2], "test split has label 2"),
        ([0.0, 1.0, 0.5, 1.0], [0, 1], "holds double"),
        ([0, 1, None, 1], [0, 1], "1 of 4 labels are missing"),
        (["a", "b", "a", "b"], [0, 1], "holds string"),
    ],
)
def test_labels_that_are_not_0_to_c_minus_1_are_refused(tmp_path: Path, train: list, test: list, message: str):
    for name, labels in (("train", train), ("test", test)):
        write(tmp_path / f"{name}.parquet", [encoded(p) for p in random_pixels(len(labels))], labels)
    with pytest.raises(DataError, match=message):
        load(spec("parquet", path="."), [tmp_path], tmp_path)


def test_a_test_file_without_the_columns_or_damaged_is_said(tmp_path: Path):
    write_set(tmp_path)
    pq.write_table(pa.table({"image": [1], "other": [2]}), tmp_path / "test.parquet")
    with pytest.raises(DataError, match=r"test\.parquet: column 'label' cannot be read"):
        load(spec("parquet", path="."), [tmp_path], tmp_path)
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"test\.parquet: column 'label' cannot be read"):
        load(spec("parquet", path="."), [tmp_path], tmp_path)


def test_paths_and_links_out_of_the_roots_are_refused(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    write_set(outside)
    root.mkdir()
    (root / "folder-link").symlink_to(outside)
    (root / "file-links").mkdir()
    for file in outside.iterdir():
        (root / "file-links" / file.name).symlink_to(file)
    for path in ("../outside", str(outside), "folder-link", "file-links"):
        with pytest.raises(SpecError):
            load(spec("parquet", path=path), [root], tmp_path)
    assert sizes(load(spec("parquet", path=str(outside)), [root, outside], tmp_path)) == (34, 6, 12)
