"""Images and labels out of Hugging Face-style Parquet files: an image column of encoded bytes, a label column."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from trials.engine.errors import DataError

_MODES = ("L", "LA", "RGB", "RGBA")  # eight bits per channel, and the value is the intensity
_ROWS_AT_ONCE = 1024


class Form(NamedTuple):
    """What all images of a data set must share."""

    mode: str
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}×{self.height} {self.mode}"


def read_labels(files: Sequence[Path], column: str) -> np.ndarray:
    """Labels of all rows of all files, int64 [n].

    Raises:
        DataError: where a label is missing, negative, or not an integer, or there are none.
    """
    parts = []
    for file in files:
        labels = _table(file, column)
        if not pa.types.is_integer(labels.type):
            raise DataError(f"{file.name}: column {column!r} holds {labels.type}, but labels must be integers 0 … C−1")
        if labels.null_count:
            raise DataError(f"{file.name}: {labels.null_count} of {len(labels)} labels are missing")
        parts.append(labels.to_numpy().astype(np.int64))
    joined = np.concatenate(parts)
    if len(joined) == 0:
        raise DataError(f"{files[0].name}: no rows")
    if joined.min() < 0:
        raise DataError(f"label {joined.min()} found, but labels must be integers 0 … C−1")
    return joined


def read_images(
    files: Sequence[Path], column: str, rows: np.ndarray, form: Form | None = None
) -> tuple[np.ndarray, Form]:
    """Decode the chosen images, and no others.

    Args:
        files: Parquet files, whose rows are numbered through in order.
        column: the image column: bytes, or a struct with a field `bytes`.
        rows: numbers of the rows wanted, in any order, each once; at least one.
        form: what every image must look like; taken from the first image when left out.

    Returns:
        uint8 [len(rows), channels, height · width] in the order of `rows`, and their form.

    Raises:
        DataError: where an image cannot be decoded or is not of the form.
    """
    place_of = {int(row): place for place, row in enumerate(rows)}
    values: np.ndarray | None = None
    first = 0
    for file in files:
        for batch in _batches(file, column):
            wanted = [i for i in range(len(batch)) if first + i in place_of]
            for i in wanted:
                image = _decode(batch[i].as_py(), file, first + i, form)
                if form is None or values is None:
                    form = form or Form(image.mode, image.width, image.height)
                    values = np.empty((len(rows), len(image.getbands()), form.width * form.height), np.uint8)
                pixels = np.asarray(image).reshape(form.height * form.width, -1)
                values[place_of[first + i]] = pixels.T
            first += len(batch)
    assert values is not None
    assert form is not None
    return values, form


def _decode(value: object, file: Path, row: int, form: Form | None) -> Image.Image:
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise DataError(f"{file.name}, row {row}: no image bytes (images kept as separate files are not supported)")
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file.name}, row {row}: the image cannot be decoded: {error}") from error
    if image.mode not in _MODES:
        raise DataError(f"{file.name}, row {row}: image mode {image.mode} is not one of {', '.join(_MODES)}")
    own = Form(image.mode, image.width, image.height)
    if form is not None and own != form:
        raise DataError(f"{file.name}, row {row}: the image is {own}, the ones before it {form}; all must be alike")
    return image


def _table(file: Path, column: str) -> pa.ChunkedArray:
    try:
        with pq.ParquetFile(file) as parquet:
            return parquet.read(columns=[column]).column(0)
    except (OSError, KeyError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{file.name}: column {column!r} cannot be read: {error}") from error


def _batches(file: Path, column: str) -> Iterator[pa.Array]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=[column]):
                yield batch.column(0)
    except (OSError, KeyError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{file.name}: column {column!r} cannot be read: {error}") from error
