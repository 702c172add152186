"""NumPy archives: `x_train`, `y_train`, `x_test`, `y_test` in one .npz file. Nothing is ever unpickled."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trials.engine.errors import DataError
from trials.engine.samples import Samples, Splits, count_classes, split_training
from trials.spec.models import DataSpec
from trials.spec.npz import NpzFile, read_array, read_headers, read_labels
from trials.spec.roots import confined_file


def read(data: DataSpec, roots: Sequence[Path]) -> Splits:
    """Read the data set and split it.

    Raises:
        SpecError: where the path is outside the roots or no file.
        DataError: where an array is missing or not what it should be; the message names the array.
    """
    file = confined_file(data.path, roots)
    try:
        headers = read_headers(file)
        train, test = _samples(file, "train", headers), _samples(file, "test", headers)
    except ValueError as error:
        raise DataError(f"{file.name}: {error}") from error
    return split_training(data, train, test, headers.shape, count_classes(train.labels, test.labels))


def _samples(file: Path, split: str, headers: NpzFile) -> Samples:
    labels = read_labels(file, f"y_{split}")
    values = read_array(file, f"x_{split}")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"x_{split} has values that are not finite; remove or replace them")
    return Samples(np.ascontiguousarray(values).reshape(len(labels), headers.shape[0], -1), labels)
