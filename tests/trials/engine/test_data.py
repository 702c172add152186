"""The loaders: what they give, how large, and what they say where the data is not what it should be."""

import contextlib
import functools
import hashlib
import http.server
import io
import pickle
import socket
import tarfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10

from trials.engine import DataError, Dataset, DataUnavailable, data, load
from trials.spec import DataSpec, SpecError, facts_for


def spec(dataset: str = "digits", **changes: Any) -> DataSpec:
    return DataSpec.model_validate({"dataset": dataset, **changes})


def sizes(dataset: Dataset) -> tuple[int, ...]:
    return tuple(len(split.labels) for split in (dataset.train, dataset.validation, dataset.test))


def encoded(pixels: np.ndarray, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form, **({"quality": 95} if form == "JPEG" else {}))
    return stream.getvalue()


def random_pixels(count: int, shape: Sequence[int] = (4, 3, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


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


# -- cifar10, by torchvision's own downloader ------------------------------------------------------


@functools.cache
def _archive() -> tuple[bytes, dict[str, Any]]:
    """An archive laid out like CIFAR-10's, of full size, with plain images (so that it packs to little)."""
    stream, md5 = io.BytesIO(), {}
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"{CIFAR10.base_folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            md5[name] = hashlib.md5(content).hexdigest()

        for number, name in enumerate(["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5",
                                       "test_batch"]):  # fmt: skip
            rows = np.zeros((10_000, 3072), np.uint8)
            rows[:, :1024] = 10 * number + 5  # the red channel
            rows[:, 2048] = np.arange(10_000) % 250
            add(name, pickle.dumps({"data": rows, "labels": [i % 10 for i in range(10_000)]}))
        add("batches.meta", pickle.dumps({"label_names": list("abcdefghij")}))
    content = stream.getvalue()
    attributes = {
        "tgz_md5": hashlib.md5(content).hexdigest(),
        "train_list": [[name, md5[name]] for name, _ in CIFAR10.train_list],
        "test_list": [[name, md5[name]] for name, _ in CIFAR10.test_list],
        "meta": {**CIFAR10.meta, "md5": md5["batches.meta"]},
    }
    return content, attributes


class _Server(http.server.ThreadingHTTPServer):
    content = b""
    fetches = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        server.fetches += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # torchvision first asks only where it is redirected to
            self.wfile.write(server.content)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def cifar_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    content, attributes = _archive()
    for name, value in attributes.items():
        monkeypatch.setattr(CIFAR10, name, value)
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.content = content
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_cifar10_is_fetched_once_however_many_call_and_has_the_catalogues_sizes(tmp_path: Path, cifar_server: _Server):
    data._cifar10(tmp_path / "alone")
    once = cifar_server.fetches
    with ThreadPoolExecutor(3) as pool:
        fetched = list(pool.map(lambda _: data._cifar10(tmp_path / "cache"), range(3)))
    assert cifar_server.fetches == 2 * once
    raw, test = fetched[0]
    assert raw.values.shape == (50_000, 3, 1024)
    assert raw.values[:, 0, 0].tolist() == [5 + 10 * (i // 10_000) for i in range(50_000)]
    assert test.values[7, 2, 0] == 7
    assert raw.labels[13] == 3
    wanted = spec("cifar10", train_samples=200)
    facts, got = facts_for(wanted, []), load(wanted, [], tmp_path / "cache")
    assert cifar_server.fetches == 2 * once
    assert sizes(got) == (facts.train, facts.validation, facts.test)
    assert (got.train.inputs.shape[1], got.classes) == (facts.features, facts.classes)


def test_a_damaged_download_is_said_and_fetched_anew_the_next_time(tmp_path: Path, cifar_server: _Server):
    whole, cifar_server.content = cifar_server.content, b"half of it"
    with pytest.raises(DataUnavailable, match="corrupted"):
        load(spec("cifar10"), [], tmp_path)
    cifar_server.content = whole
    raw, _ = data._cifar10(tmp_path)
    assert len(raw.labels) == 50_000


def test_no_network_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{closed.getsockname()[1]}/{CIFAR10.filename}")
        with pytest.raises(DataUnavailable) as caught:
            load(spec("cifar10"), [], tmp_path / "cache")
    message = str(caught.value)
    assert CIFAR10.url in message
    assert f"Put {CIFAR10.filename} there" in message
    assert "dataset: parquet" in message
    assert socket.getdefaulttimeout() is None
