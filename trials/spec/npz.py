"""What a NumPy archive with a data set must hold, judged by the headers of its arrays before any is read.

    x_train, x_test   uint8 or floating [n, features], [n, height, width] or [n, channels, height, width]
    y_train, y_test   integers 0 … C−1, [n]

Arrays of Python objects would have to be unpickled, which runs whatever code the file's author
wrote: they are refused.
"""

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from trials.spec.roots import MOST_BYTES, MOST_SAMPLES

NAMES = ("x_train", "y_train", "x_test", "y_test")

_HEADER_BYTES = 16_384  # NumPy reads headers of at most 10,000 characters
_FEWEST_IMAGE_SIDE = 5


@dataclass(frozen=True)
class NpzFile:
    """Sizes of the arrays."""

    shape: tuple[int, int, int]  # (channels, height, width) of one sample
    train: int
    test: int


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def read_headers(file: Path) -> NpzFile:
    """Read the headers of the four arrays and no values.

    Raises:
        ValueError: where an array is missing or not what it should be, or all together are larger than
            `MOST_BYTES`; the message names the array and what to do.
    """
    headers = _headers(file)
    size = sum(math.prod(header.shape) * header.dtype.itemsize for header in headers.values())
    if size > MOST_BYTES:
        raise ValueError(
            f"the arrays would take {size / 2**30:,.1f} GiB, and at most {MOST_BYTES / 2**30:.0f} GiB are read; "
            "keep fewer samples, or images as uint8"
        )
    for split in ("train", "test"):
        _check_inputs(f"x_{split}", headers[f"x_{split}"])
        _check_labels(f"y_{split}", headers[f"y_{split}"], len_inputs=headers[f"x_{split}"].shape[0])
    train, test = headers["x_train"], headers["x_test"]
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(f"x_test is {test}, but its samples must have the shape of x_train's, which is {train}")
    if (train.dtype.kind == "f") != (test.dtype.kind == "f"):
        raise ValueError(f"x_test is {test.dtype} and x_train {train.dtype}; save both as uint8 or both as float32")
    channels, height, width = (1,) * (4 - len(train.shape)) + train.shape[1:]
    return NpzFile((channels, height, width), train.shape[0], test.shape[0])


def read_labels(file: Path, name: str) -> np.ndarray:
    """Labels, int64 [n], of a file whose headers have been checked.

    Raises:
        ValueError: where there are other labels than whole numbers from 0.
    """
    labels = read_array(file, name)
    if labels.min() < 0 or labels.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} goes from {labels.min()} to {labels.max()}; labels must be 0 … C−1")
    return labels.astype(np.int64)


def read_array(file: Path, name: str) -> np.ndarray:
    """One array of a file whose headers have been checked.

    Raises:
        ValueError: where it cannot be read.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return arrays[f"{name}.npy"]
    except Exception as error:  # damaged bytes meet many parsers
        raise ValueError(f"{name} cannot be read: {error}") from error


def _headers(file: Path) -> dict[str, _Header]:
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:
        raise ValueError(
            f"cannot be read as .npz, save it with numpy.savez or numpy.savez_compressed: {error}"
        ) from None
    with archive:
        missing = sorted(set(NAMES) - {name.removesuffix(".npy") for name in archive.namelist()})
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; save x_train, y_train, x_test and y_test with numpy.savez")
        return {name: _header(archive, name) for name in NAMES}


def _header(archive: zipfile.ZipFile, name: str) -> _Header:
    try:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("packed as NumPy packs none")
        with archive.open(entry) as stream:
            start = io.BytesIO(stream.read(_HEADER_BYTES))  # a header may claim to be much longer
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(start)]
        shape, _, dtype = read(start)
    except Exception as error:
        raise ValueError(f"{name} cannot be read, save it as a NumPy array: {error}") from None
    return _Header(shape, dtype)


def _check_inputs(name: str, header: _Header) -> None:
    if header.dtype != np.uint8 and header.dtype.kind != "f":
        raise ValueError(
            f"{name} is {header}, but inputs must be uint8 or floating; convert it with .astype(numpy.uint8) "
            "or .astype(numpy.float32)"
        )
    if len(header.shape) not in (2, 3, 4) or min(header.shape) < 1:
        raise ValueError(
            f"{name} is {header}, but inputs must be [n, features], [n, height, width] or "
            "[n, channels, height, width], each at least 1"
        )
    if len(header.shape) == 4:
        _, height, width, channels = header.shape
        if height == width >= _FEWEST_IMAGE_SIDE and channels in (3, 4):
            raise ValueError(
                f"{name} is {header}: channels seem to come last, and are wanted before height and width; "
                "use .transpose(0, 3, 1, 2)"
            )
    if header.shape[0] > MOST_SAMPLES:
        raise ValueError(f"{name} is {header}, but at most {MOST_SAMPLES:,} samples are read; keep fewer")


def _check_labels(name: str, header: _Header, len_inputs: int) -> None:
    if header.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {header}, but labels must be integers 0 … C−1; convert it with .astype(numpy.int64)"
        )
    if header.shape != (len_inputs,):
        raise ValueError(f"{name} is {header}, but there must be one label for each input: [{len_inputs}]")
