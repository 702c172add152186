"""Inputs standardised channel by channel: mean 0 and standard deviation 1 over the training split."""

from collections.abc import Callable, Iterator

import numpy as np

from trials.engine.errors import DataError

_VALUES_AT_ONCE = 2**20  # values that are held in float64 at a time


def standardiser(train: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """What standardises samples by the training values: [n, channels, pixels] → float32 [n, channels · pixels].

    A channel that is constant over the training split is only shifted, so that it is 0 there.

    Args:
        train: uint8 or floating [n, channels, pixels], finite.

    Raises:
        DataError: where floating values are too large for their variance to be finite; the function
            returned raises it where a standardised value is too large for float32.
    """
    if train.dtype == np.uint8:
        table = _table(train)
        return lambda values: _look_up(table, values)
    moments = [_moments(train[:, channel]) for channel in range(train.shape[1])]
    return lambda values: _scale(moments, values)


def _table(values: np.ndarray) -> np.ndarray:
    """float32 [channels, 256]: what each value becomes. Exact whatever the order of samples: made from counts."""
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


def _moments(values: np.ndarray) -> tuple[float, float, float]:
    """(origin, mean of the values − origin, standard deviation) of floating values [n, pixels].

    Counted from the first value, so that a constant channel has a deviation of exactly 0.
    """
    origin = float(values[0, 0])
    with np.errstate(over="ignore", invalid="ignore"):  # said below
        mean = sum(float((part - origin).sum()) for _, part in _parts(values)) / values.size
        squares = sum(float(((part - origin - mean) ** 2).sum()) for _, part in _parts(values))
    deviation = np.sqrt(squares / values.size)
    if not np.isfinite(deviation):
        raise DataError("the inputs are too large to be standardised: their variance is not finite; scale them down")
    return origin, mean, float(deviation) or 1.0


def _scale(moments: list[tuple[float, float, float]], values: np.ndarray) -> np.ndarray:
    samples, channels, pixels = values.shape
    inputs = np.empty((samples, channels, pixels), np.float32)
    with np.errstate(over="ignore"):  # said below
        for channel, (origin, mean, deviation) in enumerate(moments):
            for rows, part in _parts(values[:, channel]):
                inputs[rows, channel] = (part - origin - mean) / deviation
                if not np.isfinite(inputs[rows, channel]).all():
                    raise DataError(
                        f"an input of channel {channel} is so far from the training split's that it does not fit in "
                        f"float32 once standardised (mean {origin + mean:.3g}, standard deviation {deviation:.3g})"
                    )
    return inputs.reshape(samples, channels * pixels)


def _parts(values: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Some rows at a time, in float64."""
    step = max(1, _VALUES_AT_ONCE // values.shape[1])
    for first in range(0, len(values), step):
        rows = slice(first, first + step)
        yield rows, values[rows].astype(np.float64)
