"""Data sets out of a user's own files: NumPy archives and image folders."""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from tests.trials.engine.data_files import encoded, random_pixels, sizes, spec
from trials.engine import Dataset
from trials.engine.data import load
from trials.engine.errors import DataError
from trials.spec import SpecError, facts_for

Arrays = dict[str, np.ndarray]


def arrays(train: int = 20, test: int = 8, shape: tuple[int, ...] = (3, 4, 5), dtype: Any = np.uint8) -> Arrays:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (train, *shape)).astype(dtype),
        "y_train": np.arange(train) % 4,
        "x_test": generator.integers(0, 256, (test, *shape)).astype(dtype),
        "y_test": np.arange(test) % 4,
    }


def npz(folder: Path, contents: Arrays) -> Dataset:
    np.savez_compressed(folder / "set.npz", **contents)  # pyright: ignore[reportArgumentType]
    return load(spec("npz", path="set.npz"), [folder], folder)


# -- npz -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, ">f8"])
@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 4, 5), (3, 4, 5)), ((4, 5), (1, 4, 5)), ((7,), (1, 1, 7)), ((1, 6, 6), (1, 6, 6))]
)
def test_arrays_arrive_channel_by_channel_with_their_own_labels(tmp_path: Path, dtype: Any, shape: Any, expected: Any):
    given = arrays(shape=shape, dtype=dtype)
    given["x_test"] = np.asfortranarray(given["x_test"])
    got, facts = npz(tmp_path, given), facts_for(spec("npz", path="set.npz"), [tmp_path])
    assert sizes(got) == (facts.train, facts.validation, facts.test) == (17, 3, 8)
    assert (got.shape, got.classes) == (facts.shape, facts.classes) == (expected, 4)
    assert got.train.inputs.shape[1] == facts.features
    order = np.random.default_rng([0, 0]).permutation(20)
    train = given["x_train"].reshape(20, expected[0], -1).astype(np.float64)[order[3:]]
    test = given["x_test"].reshape(8, expected[0], -1).astype(np.float64)
    mean, deviation = (f(train, axis=(0, 2))[:, None] for f in (np.mean, np.std))
    np.testing.assert_allclose(got.train.inputs, ((train - mean) / deviation).reshape(17, -1), atol=1e-5)
    np.testing.assert_allclose(got.test.inputs, ((test - mean) / deviation).reshape(8, -1), atol=1e-5)
    np.testing.assert_array_equal(got.train.labels, given["y_train"][order[3:]])


def changed(**changes: Any) -> Arrays:
    return {name: array for name, array in {**arrays(), **changes}.items() if array is not None}


FAULTS: dict[str, tuple[Callable[[], Arrays], str]] = {
    "missing": (lambda: changed(y_test=None, x_test=None), "x_test, y_test missing"),
    "int inputs": (lambda: changed(x_train=arrays()["x_train"].astype(np.int64)), r"x_train is int64.*astype"),
    "bool inputs": (lambda: changed(x_test=arrays()["x_test"] > 9), r"x_test is bool"),
    "complex": (lambda: changed(x_train=np.ones((20, 3), complex)), r"x_train is complex128"),
    "scalar": (lambda: changed(x_train=np.float32(3)), r"x_train is float32 \[\]"),
    "five axes": (
        lambda: changed(x_train=np.ones((20, 1, 1, 1, 1))),
        r"x_train is .* but inputs must be \[n, features\]",
    ),
    "no features": (lambda: changed(x_train=np.ones((20, 0))), r"x_train is .*each at least 1"),
    "no samples": (
        lambda: changed(x_test=np.ones((0, 3, 4, 5)), y_test=np.ones(0, int)),
        r"x_test is .*each at least 1",
    ),
    "channels last": (lambda: arrays(shape=(8, 8, 3)), r"x_train is .*transpose\(0, 3, 1, 2\)"),
    "other shape": (lambda: changed(x_test=np.ones((8, 3, 5, 4), np.uint8)), r"x_test is .*shape of x_train"),
    "other kind": (lambda: changed(x_test=np.ones((8, 3, 4, 5))), r"x_test is float64 and x_train uint8; save both"),
    "float labels": (lambda: changed(y_train=np.ones(20)), r"y_train is float64 .*astype\(numpy.int64\)"),
    "one-hot": (lambda: changed(y_train=np.ones((20, 4), int)), r"y_train is .*one label for each input: \[20\]"),
    "labels short": (lambda: changed(y_test=np.ones(7, int)), r"y_test is int64 \[7\].*\[8\]"),
    "negative": (lambda: changed(y_test=np.arange(8) - 1), r"y_test goes from -1 to 6"),
    "huge label": (lambda: changed(y_train=np.full(20, 2**64 - 1, np.uint64)), r"y_train goes from"),
    "gap": (lambda: changed(y_train=np.arange(20) % 4 * 2), "no sample of class 1"),
    "one class": (lambda: changed(y_train=np.zeros(20, int)), "at least two classes"),
    "test class": (lambda: changed(y_test=np.arange(8)), "test split has label 7"),
    "not a number": (
        lambda: {**arrays(dtype=float), "x_test": np.full((8, 3, 4, 5), np.nan)},
        "x_test has values that",
    ),
    "infinite": (lambda: {**arrays(dtype=float), "x_train": np.full((20, 3, 4, 5), np.inf)}, "x_train has values that"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_arrays_that_are_not_what_they_should_be_are_named(tmp_path: Path, fault: str):
    make, message = FAULTS[fault]
    with pytest.raises(DataError, match=message) as caught:
        npz(tmp_path, make())
    assert "set.npz" in str(caught.value) or fault in ("gap", "one class", "test class")


class Trap:
    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


@pytest.mark.parametrize("name", ["x_train", "y_train", "x_test", "y_test"])
def test_no_pickle_is_ever_loaded(tmp_path: Path, name: str):
    pickle.loads(pickle.dumps(Trap()))  # the trap is one
    assert Trap.sprung
    Trap.sprung = False
    trap = np.empty(1, object)
    trap[0] = Trap()
    with pytest.raises(DataError, match=f"{name} is object"):
        npz(tmp_path, changed(**{name: trap}))
    with pytest.raises(SpecError, match=f"{name} is object"):
        facts_for(spec("npz", path="set.npz"), [tmp_path])
    (tmp_path / "set.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        load(spec("npz", path="set.npz"), [tmp_path], tmp_path)
    assert not Trap.sprung


def write_archive(file: Path, members: dict[str, bytes], packing: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def member(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """An array as .npy, whose header may claim another shape."""
    stream = io.BytesIO()
    header = {"descr": npy.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape or array.shape}
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue() + array.tobytes()


def test_a_header_that_claims_more_than_the_bound_is_refused_before_memory_is_asked_for(tmp_path: Path):
    members = {f"{name}.npy": member(array) for name, array in arrays().items()}
    members["x_train.npy"] = member(np.zeros(10, np.uint8), (20, 3, 2**20, 2**20))
    # A member of the bare name would be the one that numpy.load gives for it.
    for more in ({}, {"x_train": member(np.zeros(10, np.uint8))}):
        write_archive(tmp_path / "set.npz", {**members, **more})
        with pytest.raises(DataError, match=r"61,440\.0 GiB, and at most 8 GiB are read"):
            load(spec("npz", path="set.npz"), [tmp_path], tmp_path)
        with pytest.raises(SpecError, match=r"61,440\.0 GiB"):
            facts_for(spec("npz", path="set.npz"), [tmp_path])


def test_what_was_checked_is_what_is_read(tmp_path: Path):
    members = {f"{name}.npy": member(array) for name, array in arrays().items()}
    write_archive(tmp_path / "set.npz", {"x_train": member(np.zeros((3, 2))), **members})
    assert sizes(load(spec("npz", path="set.npz"), [tmp_path], tmp_path)) == (17, 3, 8)


def test_damaged_archives_are_said(tmp_path: Path):
    whole = {f"{name}.npy": member(array) for name, array in arrays().items()}
    long_header = b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b" " * 2**20
    cases = {
        "x_train cannot be read": [
            {**whole, "x_train.npy": whole["x_train.npy"][:-9]},
            {**whole, "x_train.npy": long_header},
            {**whole, "x_train.npy": b"\x93NUMPY\x01\x00\x04\x00(((("},
            {**whole, "x_train.npy": b""},
        ],
        "x_train is": [{**whole, "x_train.npy": member(np.zeros(9, np.uint8), (-20, 3))}],
    }
    for message, damaged in cases.items():
        for members in damaged:
            write_archive(tmp_path / "set.npz", members)
            with pytest.raises(DataError, match=message):
                load(spec("npz", path="set.npz"), [tmp_path], tmp_path)
    write_archive(tmp_path / "set.npz", whole, zipfile.ZIP_LZMA)  # its reader asks for what memory the file says
    with pytest.raises(DataError, match=r"x_train cannot be read.*packed as NumPy packs none"):
        load(spec("npz", path="set.npz"), [tmp_path], tmp_path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 2000), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damage_ends_in_words(tmp_path: Path, place: int, byte: int, cut: bool):
    np.savez(tmp_path / "set.npz", **arrays(train=6, test=2, shape=(3,)))  # pyright: ignore[reportArgumentType]
    content = bytearray((tmp_path / "set.npz").read_bytes())
    place %= len(content)
    content[place] = byte
    (tmp_path / "set.npz").write_bytes(content[:place] if cut else content)
    for ask in (facts_for, lambda data, roots: load(data, roots, tmp_path)):
        try:
            ask(spec("npz", path="set.npz"), [tmp_path])
        except (SpecError, DataError) as error:
            assert str(error)


def test_npz_paths_are_confined_to_the_roots(tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    npz(outside, arrays())
    (root / "link.npz").symlink_to(outside / "set.npz")
    (root / "loop.npz").symlink_to(root / "loop.npz")
    (root / "folder.npz").mkdir()
    for path in ("../outside/set.npz", str(outside / "set.npz"), "link.npz", "loop.npz", "folder.npz", "none", "\0"):
        for ask in (facts_for, lambda data, roots: load(data, roots, tmp_path)):
            with pytest.raises(SpecError, match="no file") as caught:
                ask(spec("npz", path=path), [root])
            assert caught.value.issues[0].pointer == "/data/path"
    assert sizes(load(spec("npz", path="link.npz"), [root, outside], tmp_path)) == (17, 3, 8)


# -- images --------------------------------------------------------------------------------------


def write_images(folder: Path, shape: tuple[int, ...] = (4, 3, 3)) -> dict[str, np.ndarray]:
    """20 training and 6 test images of three classes; what is in each file."""
    written = {}
    pixels = iter(random_pixels(26, shape))
    for split, counts in (("train", {"zebra": 9, "ape": 7, "Lynx": 4}), ("test", {"ape": 2, "zebra": 4})):
        for name, count in counts.items():
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                file = f"{split}/{name}/{number}.{'PNG' if number % 2 else 'png'}"
                written[file] = next(pixels)
                (folder / file).write_bytes(encoded(written[file]))
    return written


def images(root: Path, **changes: Any) -> Dataset:
    return load(spec("images", path="set", **changes), [root], root)


@pytest.mark.parametrize(("shape", "expected"), [((4, 3, 3), (3, 4, 3)), ((5, 6), (1, 5, 6)), ((2, 2, 4), (4, 2, 2))])
def test_image_folders_arrive_by_sorted_class_and_name(tmp_path: Path, shape: tuple[int, ...], expected: Any):
    written = write_images(tmp_path / "set", shape)
    (tmp_path / "set" / "train" / ".DS_Store").write_bytes(b"")
    (tmp_path / "set" / "train" / "ape" / ".hidden.png").write_bytes(b"")
    (tmp_path / "set" / "readme.txt").write_bytes(b"")
    facts, got = facts_for(spec("images", path="set"), [tmp_path]), images(tmp_path)
    assert sizes(got) == (facts.train, facts.validation, facts.test) == (17, 3, 6)
    assert (got.shape, got.classes) == (facts.shape, facts.classes) == (expected, 3)
    assert (facts.train_available, facts.features) == (20, got.train.inputs.shape[1])
    files = sorted(file for file in written if file.startswith("train"))  # Lynx, ape, zebra
    order = np.random.default_rng([0, 0]).permutation(20)
    assert got.train.labels.tolist() == [("Lynx", "ape", "zebra").index(files[i].split("/")[1]) for i in order[3:]]
    assert got.test.labels.tolist() == [1] * 2 + [2] * 4
    flat = np.stack([written[file].reshape(*shape[:2], -1).transpose(2, 0, 1) for file in files]).astype(np.float64)
    train = flat[order[3:]]
    mean, deviation = (f(train, axis=(0, 2, 3))[:, None, None] for f in (np.mean, np.std))
    np.testing.assert_allclose(got.train.inputs, ((train - mean) / deviation).reshape(17, -1), atol=1e-5)


def test_only_the_images_asked_for_are_decoded(tmp_path: Path):
    """All others are damaged, but the first, whose size is looked at."""
    written = write_images(tmp_path / "set")
    files = sorted(file for file in written if file.startswith("train"))
    for row in set(range(1, 20)) - set(np.random.default_rng([0, 0]).permutation(20)[:10].tolist()):
        (tmp_path / "set" / files[row]).write_bytes(b"damaged")
    assert sizes(images(tmp_path, train_samples=10)) == (8, 2, 6)
    with pytest.raises(DataError, match=r"train/\w+/\d\.(png|PNG): the image cannot be decoded"):
        images(tmp_path)


def test_images_that_are_not_alike_are_named(tmp_path: Path):
    write_images(tmp_path / "set")
    for pixels, words in (((5, 3, 3), "3×5 RGB"), ((4, 3), "3×4 L")):
        (tmp_path / "set" / "test" / "ape" / "0.png").write_bytes(encoded(random_pixels(1, pixels)[0]))
        with pytest.raises(DataError, match=rf"test/ape/0\.png: the image is {words}, the ones before it 3×4 RGB"):
            images(tmp_path)


def spoil(folder: Path, fault: str) -> None:
    match fault:
        case "no train":
            (folder / "train").rename(folder / "training")
        case "stray file":
            (folder / "train" / "list.csv").write_bytes(b"")
        case "not an image":
            (folder / "train" / "ape" / "notes.txt").write_bytes(b"")
        case "folder in class":
            (folder / "test" / "ape" / "more.png").mkdir()
        case "empty class":
            (folder / "train" / "yak").mkdir()
        case "test class":
            (folder / "test" / "yak").mkdir()
        case "no test images":
            for file in (folder / "test").glob("*/*"):
                file.unlink()
        case "no classes":
            (folder / "train").rename(folder / "old")
            (folder / "train").mkdir()
            (folder / "test").rename(folder / "older")
            (folder / "test").mkdir()
        case "no train classes":
            (folder / "train").rename(folder / "old")
            (folder / "train").mkdir()
        case "one class":
            for name in ("ape", "Lynx"):
                (folder / "train" / name).rename(folder / name)
            (folder / "test" / "ape").rename(folder / "test ape")
        case "first damaged":
            (folder / "train" / "Lynx" / "0.png").write_bytes(b"damaged")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no train", "no folder 'train' in 'set'"),
        ("stray file", r"train/list\.csv is not a folder"),
        ("not an image", r"train/ape/notes\.txt is not an image file"),
        ("folder in class", r"test/ape/more\.png is not an image file"),
        ("empty class", "train/yak has no images"),
        ("test class", "test/yak has no counterpart in train; its classes are Lynx, ape, zebra"),
        ("no test images", "test has no images"),
        ("no classes", "train has no folders"),
        ("no train classes", "train has no folders"),
        ("one class", "train has one class only, zebra; a data set needs at least two"),
        ("first damaged", r"train/Lynx/0\.png cannot be read"),
    ],
)
def test_folders_that_are_not_laid_out_so_are_said(tmp_path: Path, fault: str, words: str):
    write_images(tmp_path / "set")
    spoil(tmp_path / "set", fault)
    with pytest.raises(SpecError, match=words) as caught:
        facts_for(spec("images", path="set"), [tmp_path])
    assert caught.value.issues[0].pointer == "/data/path"
    with pytest.raises((SpecError, DataError), match=words.replace(" cannot be read", ": the image cannot be decoded")):
        images(tmp_path)


@pytest.mark.parametrize("place", ["", "train", "train/ape", "train/ape/0.png", "test/zebra/1.PNG"])
def test_links_may_lead_within_the_roots_and_not_out_of_them(tmp_path: Path, place: str):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    write_images(root / "set")
    expected = images(root).checksum
    (root / "set" / place).rename(outside)
    (root / "set" / place).symlink_to(outside)
    for ask in (facts_for, lambda data, roots: load(data, roots, tmp_path)):
        with pytest.raises(SpecError, match="outside the allowed data roots" if place else "no folder"):
            ask(spec("images", path="set"), [root])
    assert load(spec("images", path="set"), [root, outside], tmp_path).checksum == expected


def test_images_that_would_not_fit_are_refused_by_their_number(tmp_path: Path):
    """A few bytes can be an image of very many equal pixels; it is not decoded to see that."""
    write_images(tmp_path / "set")
    content = bytearray(encoded(random_pixels(1, (4, 3, 4))[0]))
    content[16:24] = struct.pack(">II", 9400, 9400)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    (tmp_path / "set" / "train" / "Lynx" / "0.png").write_bytes(content)
    with pytest.raises(SpecError, match=r"these images would take 8\.6 GiB"):
        facts_for(spec("images", path="set"), [tmp_path])
    facts_for(spec("images", path="set", train_samples=10), [tmp_path])
