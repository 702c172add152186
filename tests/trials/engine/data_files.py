"""What the tests of the data sets share: specs, sizes, and images as files."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from trials.engine import Dataset
from trials.spec import DataSpec


def spec(dataset: str = "digits", **changes: Any) -> DataSpec:
    return DataSpec.model_validate({"dataset": dataset, **changes})


def sizes(dataset: Dataset) -> tuple[int, ...]:
    return tuple(len(split.labels) for split in (dataset.train, dataset.validation, dataset.test))


def encoded(pixels: np.ndarray, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form, **({"quality": 95} if form == "JPEG" else {}))
    return stream.getvalue()


def random_pixels(count: int, shape: Sequence[int] = (4, 3, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)
