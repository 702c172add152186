"""Data sets as resident arrays: split by the spec's split seed alone, standardised by the training split.

    DataError            the data set is there and is not what it should be
      DataUnavailable    it is not there and cannot be fetched

The training samples are ordered by `numpy.random.default_rng([split_seed, 0])`; `train_samples`
keeps the first of them, of which the first `validation_fraction` are the validation split. Where
a data set has no test split of its own, `default_rng([split_seed, 1])` draws one first. Sizes
are those of `trials.spec.catalogue`.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trials.engine import arrays, folders, parquet, synthetic, torchvision_sets
from trials.engine.dataset import Dataset, Split
from trials.engine.errors import DataError, DataUnavailable
from trials.engine.samples import Samples, Splits, split_all, split_training
from trials.engine.standardise import standardiser
from trials.spec.catalogue import FETCHED
from trials.spec.models import DataSpec

__all__ = ["DataError", "DataUnavailable", "Dataset", "Split", "load"]


def load(data: DataSpec, roots: Sequence[Path], cache_dir: Path) -> Dataset:
    """Load a data set.

    Args:
        data: what to load and how to split it.
        roots: the folders under which the path of `parquet`, `npz` and `images` may lie.
        cache_dir: where downloads are kept, shared by all processes of a node.

    Raises:
        SpecError: where a path is outside the roots or holds no such data set, or where a synthetic
            data set is too large.
        DataUnavailable: where a data set that torchvision fetches is not in the cache and cannot be had.
        DataError: where the files hold something else than samples of one shape with labels 0 … C−1.
    """
    splits = _read(data, roots, cache_dir)
    if len(splits.train.labels) == 0:
        raise DataError("no training sample is left once the validation split is taken")
    standardise = standardiser(splits.train.values)
    digest = hashlib.sha256()
    standardised = []
    for samples in splits[:3]:
        split = Split(standardise(samples.values), np.ascontiguousarray(samples.labels))
        for array in split:
            array.setflags(write=False)
            digest.update(f"{array.dtype} {array.shape} ".encode())
            digest.update(array.data)
        standardised.append(split)
    return Dataset(*standardised, classes=splits.classes, checksum=digest.hexdigest(), shape=splits.shape)


def _read(data: DataSpec, roots: Sequence[Path], cache_dir: Path) -> Splits:
    if data.dataset == "digits":
        return split_all(data, _digits(), (1, 8, 8), classes=10)
    if data.dataset == "synthetic":
        return synthetic.read(data)
    if data.dataset == "parquet":
        return parquet.read(data, roots)
    if data.dataset == "npz":
        return arrays.read(data, roots)
    if data.dataset == "images":
        return folders.read(data, roots)
    train, test = torchvision_sets.fetch(data.dataset, cache_dir)
    facts = FETCHED[data.dataset]
    return split_training(data, train, test, facts.shape, facts.classes)


def _digits() -> Samples:
    from sklearn.datasets import load_digits  # a slow import, for this data set only

    values, labels = load_digits(return_X_y=True)  # values 0 … 16
    return Samples(np.asarray(values).astype(np.uint8)[:, None, :], np.asarray(labels).astype(np.int64))
