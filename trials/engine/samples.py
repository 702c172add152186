"""Samples as they came and how they are split: what every loader of a data set shares."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from trials.engine.errors import DataError
from trials.spec.catalogue import ONE_CLASS, split_sizes, test_size
from trials.spec.models import DataSpec

Splitter = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""From the number of training samples to the rows of the (training, validation) splits among them."""


class Samples(NamedTuple):
    """Samples as they came: values uint8 or floating [n, channels, pixels], labels int64 [n]."""

    values: np.ndarray
    labels: np.ndarray

    def take(self, rows: np.ndarray) -> "Samples":
        return Samples(self.values[rows], self.labels[rows])


class Splits(NamedTuple):
    """A data set, split and not yet standardised; `shape` is (channels, height, width) of one sample."""

    train: Samples
    validation: Samples
    test: Samples
    shape: tuple[int, int, int]
    classes: int


def splitter(data: DataSpec) -> Splitter:
    """The splitter of a spec: it depends on the split seed, the sizes asked for, and nothing else."""

    def split(available: int) -> tuple[np.ndarray, np.ndarray]:
        train, validation = split_sizes(data, available)
        order = np.random.default_rng([data.split_seed, 0]).permutation(available)
        return order[validation : validation + train], order[:validation]

    return split


def split_training(
    data: DataSpec, samples: Samples, test: Samples, shape: tuple[int, int, int], classes: int
) -> Splits:
    """Split the training samples of a data set that has a test split of its own."""
    train, validation = splitter(data)(len(samples.labels))
    return Splits(samples.take(train), samples.take(validation), test, shape, classes)


def split_all(data: DataSpec, samples: Samples, shape: tuple[int, int, int], classes: int) -> Splits:
    """Split a data set without a test split of its own: the test split is drawn first."""
    count = len(samples.labels)
    held_out = test_size(data, count)
    order = np.random.default_rng([data.split_seed, 1]).permutation(count)
    test, rest = order[:held_out], order[held_out:]
    train, validation = splitter(data)(len(rest))
    return Splits(samples.take(rest[train]), samples.take(rest[validation]), samples.take(test), shape, classes)


def count_classes(labels: np.ndarray, test_labels: np.ndarray) -> int:
    """C ≥ 2, where the training labels are 0 … C−1 with none left out and no test label is larger.

    Raises:
        DataError: where they are not.
    """
    classes = int(labels.max()) + 1
    missing = np.setdiff1d(np.arange(classes), labels)
    if len(missing):
        raise DataError(
            f"training labels must be 0 … C−1 with every class present; the largest is {classes - 1}, "
            f"but there is no sample of class {missing[0]}"
        )
    if classes < 2:
        raise DataError(ONE_CLASS)
    if test_labels.max() >= classes:
        raise DataError(f"the test split has label {test_labels.max()}, but the training labels are 0 … {classes - 1}")
    return classes
