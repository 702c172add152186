"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, fetched by torchvision into the cache by whoever comes first.

Every archive that is fetched is held against torchvision's MD5 before it is read, so the pickles in
CIFAR's are its authors' and nobody else's.
"""

import gzip
import hashlib
import http.client
import pickle
import socket
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from trials.engine.errors import DataUnavailable
from trials.engine.samples import Samples

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the archives of Fashion-MNIST."""

_FASHION_MNIST_SHA256 = {  # unpacked: the gzip headers of Debian's archives are not those of torchvision's MD5s
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_DOWNLOAD_TIMEOUT = 60.0  # seconds without a byte
_FAULTS = (
    OSError,
    RuntimeError,
    EOFError,
    TypeError,
    ValueError,
    AssertionError,
    http.client.HTTPException,
    tarfile.TarError,
    zlib.error,
    pickle.PickleError,
)


def fetch(name: str, cache_dir: Path) -> tuple[Samples, Samples]:
    """Training and test samples of `mnist`, `fashion_mnist`, `cifar10` or `cifar100`.

    However many processes of a node call, one fetches and the others wait for it. Fashion-MNIST is
    taken from `DEBIAN_FASHION_MNIST` where it is installed.

    Raises:
        DataUnavailable: where it is not in the cache and cannot be fetched.
    """
    from torchvision import datasets  # a slow import

    source: Any = {
        "mnist": datasets.MNIST,
        "fashion_mnist": datasets.FashionMNIST,
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
    }[name]
    is_mnist = issubclass(source, datasets.MNIST)
    root = cache_dir / name
    archives = root / source.__name__ / "raw" if is_mnist else root
    try:
        archives.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"), _socket_timeout(_DOWNLOAD_TIMEOUT):
            if is_mnist:
                _prepare(source, archives)
            splits = [source(root, train=train, download=train) for train in (True, False)]
    except _FAULTS as error:
        files = ", ".join(file for file, _ in source.resources) if is_mnist else source.filename
        hint = ", install Debian's package dataset-fashion-mnist" if name == "fashion_mnist" else ""
        raise DataUnavailable(
            f"{name} is not in {root} and cannot be fetched from {source.mirrors[0] if is_mnist else source.url} "
            f"({type(error).__name__}: {error}). Put {files} into {archives} yourself{hint}, or use "
            f"`dataset: parquet` with a `path` to image files"
        ) from error
    return _samples(splits[0]), _samples(splits[1])


def _prepare(source: Any, folder: Path) -> None:
    """Leave no file that may be cut short, and take what Debian's package has.

    torchvision checks the archives and not what it has unpacked, which is cut short where a process
    died meanwhile; so that is unpacked anew each time.
    """
    from torchvision.datasets.utils import check_integrity

    for file, md5 in source.resources:
        unpacked = folder / Path(file).stem
        if check_integrity(folder / file, md5):
            unpacked.unlink(missing_ok=True)
        elif source.__name__ == "FashionMNIST" and not unpacked.exists():
            _take_from_debian(file, unpacked)


def _take_from_debian(file: str, unpacked: Path) -> None:
    """Unpack an archive of Debian's package, where it is installed with the content it should have."""
    try:
        content = gzip.decompress((DEBIAN_FASHION_MNIST / file).read_bytes())
    except (OSError, EOFError, zlib.error):  # not there, or damaged: it is fetched
        return
    if hashlib.sha256(content).hexdigest() == _FASHION_MNIST_SHA256[unpacked.name]:
        part = unpacked.with_name(f".{unpacked.name}.part")
        part.write_bytes(content)
        part.replace(unpacked)


def _samples(split: Any) -> Samples:
    values = np.asarray(split.data)
    values = values.transpose(0, 3, 1, 2) if values.ndim == 4 else values[:, None]
    values = np.ascontiguousarray(values)
    return Samples(values.reshape(*values.shape[:2], -1), np.asarray(split.targets, np.int64))


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision's downloader sets no timeout, so a silent server would hold the lock for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
