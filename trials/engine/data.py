"""Data sets as resident arrays: split by the spec's split seed alone, standardised by the training split.

    DataError            the data set is there and is not what it should be
      DataUnavailable    it is not there and cannot be fetched

The training samples are ordered by `numpy.random.default_rng([split_seed, 0])`; `train_samples`
keeps the first of them, of which the first `validation_fraction` are the validation split. Where
a data set has no test split of its own, `default_rng([split_seed, 1])` draws one first. Sizes
are those of `trials.spec.catalogue`.
"""

import hashlib
import http.client
import pickle
import socket
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from trials.engine.errors import DataError, DataUnavailable
from trials.engine.images import read_images, read_labels
from trials.spec.catalogue import find_parquet, split_sizes
from trials.spec.models import DataSpec

__all__ = ["DataError", "DataUnavailable", "Dataset", "Split", "load"]

_DOWNLOAD_TIMEOUT = 60.0  # seconds without a byte


class Split(NamedTuple):
    """Samples of one split: inputs float32 [n, features], labels int64 [n]. Both read-only."""

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set, split and standardised. Images are flattened channel by channel (C, H, W)."""

    train: Split
    validation: Split
    test: Split
    classes: int
    checksum: str  # SHA-256 (hex) over the content of all six arrays


class _Raw(NamedTuple):
    """Samples as they came: values uint8 [n, channels, pixels], labels int64 [n]."""

    values: np.ndarray
    labels: np.ndarray


def load(data: DataSpec, roots: Sequence[Path], cache_dir: Path) -> Dataset:
    """Load a data set.

    Args:
        data: what to load and how to split it.
        roots: the folders under which a `parquet` path may lie.
        cache_dir: where downloads are kept, shared by all processes of a node.

    Raises:
        SpecError: where a `parquet` path is outside the roots or holds no such data set.
        DataUnavailable: where `cifar10` is not in the cache and cannot be fetched.
        DataError: where the files hold something else than images of one size and mode with
            labels 0 … C−1.
    """
    if data.dataset == "digits":
        raw = _digits()
        count = len(raw.labels)
        test_count = max(1, round(count * data.test_fraction))
        order = np.random.default_rng([data.split_seed, 1]).permutation(count)
        test, rest = order[:test_count], order[test_count:]
        train, validation = _split(data, len(rest))
        return _dataset(_take(raw, rest[train]), _take(raw, rest[validation]), _take(raw, test), classes=10)
    if data.dataset == "cifar10":
        raw, raw_test = _cifar10(cache_dir)
        train, validation = _split(data, len(raw.labels))
        return _dataset(_take(raw, train), _take(raw, validation), raw_test, classes=10)
    return _parquet(data, roots)


def _split(data: DataSpec, available: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the (training, validation) samples among the `available` ones."""
    train, validation = split_sizes(data, available)
    order = np.random.default_rng([data.split_seed, 0]).permutation(available)
    return order[validation : validation + train], order[:validation]


def _take(raw: _Raw, indices: np.ndarray) -> _Raw:
    return _Raw(raw.values[indices], raw.labels[indices])


def _dataset(train: _Raw, validation: _Raw, test: _Raw, classes: int) -> Dataset:
    if len(train.labels) == 0:
        raise DataError("no training sample is left once the validation split is taken")
    table = _standardising_table(train.values)
    splits = [Split(_look_up(table, raw.values), np.ascontiguousarray(raw.labels)) for raw in (train, validation, test)]
    digest = hashlib.sha256()
    for split in splits:
        for array in split:
            array.setflags(write=False)
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(array.data)
    return Dataset(*splits, classes=classes, checksum=digest.hexdigest())


def _standardising_table(values: np.ndarray) -> np.ndarray:
    """float32 [channels, 256]: what each value becomes, with the channel's mean 0 and standard deviation 1.

    Exact whatever the order of samples, as it is made from counts. A constant channel becomes 0.
    """
    levels = np.arange(256, dtype=np.float64)
    table = np.empty((values.shape[1], 256), np.float32)
    for channel in range(values.shape[1]):
        share = np.bincount(values[:, channel].reshape(-1), minlength=256) / values[:, channel].size
        mean = share @ levels
        deviation = np.sqrt(share @ (levels - mean) ** 2)
        table[channel] = (levels - mean) / (deviation or 1.0)
    return table


def _look_up(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    samples, channels, pixels = values.shape
    inputs = np.empty((samples, channels, pixels), np.float32)
    for channel in range(channels):
        inputs[:, channel] = table[channel][values[:, channel]]
    return inputs.reshape(samples, channels * pixels)


def _digits() -> _Raw:
    from sklearn.datasets import load_digits  # a slow import, for this data set only

    values, labels = load_digits(return_X_y=True)  # values 0 … 16
    return _Raw(np.asarray(values).astype(np.uint8)[:, None, :], np.asarray(labels).astype(np.int64))


def _parquet(data: DataSpec, roots: Sequence[Path]) -> Dataset:
    files = find_parquet(data, roots)
    labels = read_labels(files.train, files.label_column)
    test_labels = read_labels(files.test, files.label_column)
    classes = int(labels.max()) + 1
    missing = np.setdiff1d(np.arange(classes), labels)
    if len(missing):
        raise DataError(
            f"training labels must be 0 … C−1 with every class present; the largest is {classes - 1}, "
            f"but there is no sample of class {missing[0]}"
        )
    if test_labels.max() >= classes:
        raise DataError(f"the test split has label {test_labels.max()}, but the training labels are 0 … {classes - 1}")
    train, validation = _split(data, len(labels))
    kept = np.concatenate([train, validation])  # only these images are decoded
    images, form = read_images(files.train, files.image_column, kept)
    test_images, _ = read_images(files.test, files.image_column, np.arange(len(test_labels)), form)
    cut = len(train)
    return _dataset(
        _Raw(images[:cut], labels[train]),
        _Raw(images[cut:], labels[validation]),
        _Raw(test_images, test_labels),
        classes,
    )


def _cifar10(cache_dir: Path) -> tuple[_Raw, _Raw]:
    """CIFAR-10's training and test samples, fetched into the cache by whoever comes first."""
    from torchvision.datasets import CIFAR10

    root = cache_dir / "cifar10"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"), _socket_timeout(_DOWNLOAD_TIMEOUT):
            splits = [CIFAR10(root, train=train, download=train) for train in (True, False)]
    except (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, pickle.PickleError) as error:
        raise DataUnavailable(
            f"cifar10 is not in {root} and cannot be fetched from {CIFAR10.url} ({type(error).__name__}: {error}). "
            f"Put {CIFAR10.filename} there yourself, or use `dataset: parquet` with a `path` to image files"
        ) from error
    raws = []
    for split in splits:
        values = np.ascontiguousarray(split.data.transpose(0, 3, 1, 2))
        raws.append(_Raw(values.reshape(len(values), 3, -1), np.asarray(split.targets, np.int64)))
    return raws[0], raws[1]


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """torchvision's downloader sets no timeout, so a silent server would hold the lock for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
