"""What a pack trains on: a data set as resident arrays, however it was come by (`trials.engine.data`)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


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
    shape: tuple[int, int, int]  # (channels, height, width) of one sample; a plain vector is (1, 1, n)
