"""Images and labels out of Hugging Face-style Parquet files: an image column of encoded bytes, a label column."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trials.engine.errors import DataError
from trials.engine.images import Decoder, Form
from trials.engine.samples import Samples, Splits, count_classes, splitter
from trials.spec.catalogue import find_parquet
from trials.spec.images import NO_BYTES, content_of
from trials.spec.models import DataSpec

_ROWS_AT_ONCE = 1024


def read(data: DataSpec, roots: Sequence[Path]) -> Splits:
    """Read the data set and split it; only images that are used are decoded.

    Raises:
        SpecError: where the path is outside the roots or holds no such files.
        DataError: where the files hold something else than images of one size and mode with labels 0 … C−1.
    """
    files = find_parquet(data, roots)
    labels = _read_labels(files.train, files.label_column)
    test_labels = _read_labels(files.test, files.label_column)
    classes = count_classes(labels, test_labels)
    train, validation = splitter(data)(len(labels))
    images, form = _read_images(files.train, files.image_column, np.concatenate([train, validation]))
    test_images, _ = _read_images(files.test, files.image_column, np.arange(len(test_labels)), form)
    cut = len(train)
    return Splits(
        Samples(images[:cut], labels[train]),
        Samples(images[cut:], labels[validation]),
        Samples(test_images, test_labels),
        form.shape,
        classes,
    )


def _read_labels(files: Sequence[Path], column: str) -> np.ndarray:
    """Labels of all rows of all files, int64 [n]."""
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


def _read_images(
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
    """
    place_of = {int(row): place for place, row in enumerate(rows)}
    decoder = Decoder(len(rows), form)
    first = 0
    for file in files:
        for batch in _batches(file, column):
            for i in range(len(batch)):
                place = place_of.get(first + i)
                if place is not None:
                    name = f"{file.name}, row {first + i}"
                    decoder.decode(place, _content(batch[i].as_py(), name), name)
            first += len(batch)
    return decoder.decoded()


def _content(value: object, name: str) -> bytes:
    content = content_of(value)
    if content is None:
        raise DataError(f"{name}: {NO_BYTES}")
    return content


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
