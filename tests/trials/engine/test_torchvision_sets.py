"""The data sets that torchvision fetches: by its own downloader, from a server with small archives."""

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import pickle
import socket
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision import datasets

from tests.trials.engine.data_files import sizes, spec
from trials.engine import torchvision_sets
from trials.engine.data import load
from trials.engine.errors import DataUnavailable
from trials.engine.torchvision_sets import DEBIAN_FASHION_MNIST, fetch
from trials.spec import facts_for
from trials.spec.catalogue import FETCHED

SOURCES: dict[str, Any] = {
    "mnist": datasets.MNIST,
    "fashion_mnist": datasets.FashionMNIST,
    "cifar10": datasets.CIFAR10,
    "cifar100": datasets.CIFAR100,
}
TRAIN, TEST = 40, 12


def pixels(name: str) -> tuple[np.ndarray, np.ndarray]:
    """What the archives hold: training and test images [n, channels, height, width]."""
    generator = np.random.default_rng(len(name))
    shape = FETCHED[name].shape
    train, test = (generator.integers(0, 256, (n, *shape), dtype=np.uint8) for n in (TRAIN, TEST))
    return train, test


def labels(name: str, count: int) -> list[int]:
    return [i % FETCHED[name].classes for i in range(count)]


def cifar_archive(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """An archive laid out like the real one, with its MD5s."""
    source, (train, test) = SOURCES[name], pixels(name)
    key = "labels" if name == "cifar10" else "fine_labels"
    files = {source.meta["filename"]: pickle.dumps({source.meta["key"]: []})}
    members = source.train_list
    for number, (file, _) in enumerate(members):
        rows = slice(number * TRAIN // len(members), (number + 1) * TRAIN // len(members))
        some = train[rows].reshape(-1, 3072)
        files[file] = pickle.dumps({"data": some, key: labels(name, TRAIN)[rows]})
    files[source.test_list[0][0]] = pickle.dumps({"data": test.reshape(-1, 3072), key: labels(name, TEST)})
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for file, content in files.items():
            info = tarfile.TarInfo(f"{source.base_folder}/{file}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    md5 = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    return {source.filename: stream.getvalue()}, {
        "tgz_md5": hashlib.md5(stream.getvalue()).hexdigest(),
        "train_list": [[file, md5[file]] for file, _ in source.train_list],
        "test_list": [[file, md5[file]] for file, _ in source.test_list],
        "meta": {**source.meta, "md5": md5[source.meta["filename"]]},
    }


def mnist_archives(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    contents = {}
    for (images, targets), split in zip(
        ((array, labels(name, len(array))) for array in pixels(name)), ("train", "t10k"), strict=True
    ):
        shape = (len(images), *images.shape[2:])
        contents[f"{split}-images-idx3-ubyte.gz"] = np.array([0x803, *shape], ">i4").tobytes() + images.tobytes()
        contents[f"{split}-labels-idx1-ubyte.gz"] = np.array([0x801, len(images)], ">i4").tobytes() + bytes(targets)
    contents = {file: gzip.compress(content) for file, content in contents.items()}
    md5s = [(file, hashlib.md5(contents[file]).hexdigest()) for file, _ in SOURCES[name].resources]
    return contents, {"resources": md5s}


class Server(http.server.ThreadingHTTPServer):
    contents: dict[str, bytes]
    fetches = 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.fetches += 1
        content = server.contents[self.path.rpartition("/")[2]]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # torchvision first asks only where it is redirected to
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """Serves all four data sets, where torchvision looks for them."""
    monkeypatch.setattr(torchvision_sets, "DEBIAN_FASHION_MNIST", tmp_path / "not installed")
    with Server(("127.0.0.1", 0), Handler) as one:
        one.contents = {}
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def serve(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = f"http://127.0.0.1:{server.server_port}/"
    if name.startswith("cifar"):
        contents, attributes = cifar_archive(name)
        attributes["url"] = base + SOURCES[name].filename
    else:
        contents, attributes = mnist_archives(name)
        attributes["mirrors"] = [base]
    for attribute, value in attributes.items():
        monkeypatch.setattr(SOURCES[name], attribute, value)
    server.contents = contents


@pytest.mark.parametrize("name", FETCHED)
def test_fetched_once_however_many_call_and_read_channel_by_channel(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, name: str
):
    serve(server, name, monkeypatch)
    fetch(name, tmp_path / "alone")
    once = server.fetches
    with ThreadPoolExecutor(3) as pool:
        fetched = list(pool.map(lambda _: fetch(name, tmp_path / "cache"), range(3)))
    assert server.fetches == 2 * once
    channels, height, width = FETCHED[name].shape
    for both in fetched:
        for got, expected in zip(both, pixels(name), strict=True):
            np.testing.assert_array_equal(got.values, expected.reshape(len(expected), channels, height * width))
            assert got.labels.tolist() == labels(name, len(expected))
    wanted = spec(name, train_samples=20)
    facts, got = facts_for(wanted, []), load(wanted, [], tmp_path / "cache")
    assert server.fetches == 2 * once
    assert sizes(got) == (facts.train, facts.validation, TEST)
    assert (got.train.inputs.shape[1], got.shape, got.classes) == (facts.features, facts.shape, facts.classes)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_damaged_download_is_said_and_fetched_anew_the_next_time(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, name: str
):
    serve(server, name, monkeypatch)
    whole, server.contents = server.contents, dict.fromkeys(server.contents, b"half of it")
    with pytest.raises(DataUnavailable, match="corrupted"):
        load(spec(name), [], tmp_path)
    server.contents = whole
    raw, _ = fetch(name, tmp_path)
    assert len(raw.labels) == TRAIN


def test_what_a_process_that_died_left_half_unpacked_is_unpacked_anew(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    serve(server, "mnist", monkeypatch)
    fetch("mnist", tmp_path)
    fetches = server.fetches
    unpacked = tmp_path / "mnist" / "MNIST" / "raw" / "train-images-idx3-ubyte"
    unpacked.write_bytes(unpacked.read_bytes()[:5000])
    raw, _ = fetch("mnist", tmp_path)
    np.testing.assert_array_equal(raw.values.reshape(-1), pixels("mnist")[0].reshape(-1))
    assert server.fetches == fetches


def test_fashion_mnist_is_taken_from_debians_package_and_a_damaged_file_of_it_is_fetched(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
):
    serve(server, "fashion_mnist", monkeypatch)
    installed, sha256 = tmp_path / "installed", {}
    installed.mkdir()
    for file, content in server.contents.items():
        content = gzip.decompress(content)
        (installed / file).write_bytes(gzip.compress(content, 1, mtime=7))  # other bytes, the same content
        sha256[Path(file).stem] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(torchvision_sets, "DEBIAN_FASHION_MNIST", installed)
    monkeypatch.setattr(torchvision_sets, "_FASHION_MNIST_SHA256", sha256)
    packaged = load(spec("fashion_mnist"), [], tmp_path / "cache")
    assert load(spec("fashion_mnist"), [], tmp_path / "cache").checksum == packaged.checksum
    assert server.fetches == 0
    other = gzip.compress(np.array([0x801, TEST], ">i4").tobytes() + bytes(TEST))
    for number, damaged in enumerate([b"damaged", other[:-9], other]):
        (installed / "t10k-labels-idx1-ubyte.gz").write_bytes(damaged)
        fetches = server.fetches
        assert load(spec("fashion_mnist"), [], tmp_path / f"cache {number}").checksum == packaged.checksum
        assert server.fetches > fetches


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir() and not os.environ.get("CI"),
    reason="Debian's dataset-fashion-mnist is not installed",
)
def test_the_real_fashion_mnist_has_the_catalogues_sizes(tmp_path: Path):
    wanted = spec("fashion_mnist")
    facts, got = facts_for(wanted, []), load(wanted, [], tmp_path)
    assert sizes(got) == (facts.train, facts.validation, facts.test)
    assert (got.train.inputs.shape[1], got.shape, got.classes) == (facts.features, facts.shape, facts.classes)


@pytest.mark.parametrize("name", FETCHED)
def test_no_network_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(torchvision_sets, "DEBIAN_FASHION_MNIST", tmp_path / "not installed")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        base = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        source = SOURCES[name]
        if name.startswith("cifar"):
            monkeypatch.setattr(source, "url", base + source.filename)
        else:
            monkeypatch.setattr(source, "mirrors", [base])
        with pytest.raises(DataUnavailable) as caught:
            load(spec(name), [], tmp_path / "cache")
    message = str(caught.value)
    files = [source.filename] if name.startswith("cifar") else [file for file, _ in source.resources]
    for words in (base, f"Put {', '.join(files)} into {tmp_path / 'cache' / name}", "dataset: parquet"):
        assert words in message
    assert ("dataset-fashion-mnist" in message) == (name == "fashion_mnist")
    assert socket.getdefaulttimeout() is None
