"""The synthetic data set: Gaussian classes whose inputs differ in length.

    x = exp(spread · t) · (separation · d_c + e),    t ~ N(0, 1),  e ~ N(0, 1) per feature

d_c is the direction of class c: a unit vector, uniform on the sphere. All is drawn by
`numpy.random.default_rng([split_seed, 2])` in this order: the directions (normal vectors scaled to
length 1) [classes, features], the labels [samples], t [samples], e [samples, features].

With spread 0 lengths are those of Gaussian noise, ‖x‖² = features + separation² ± √(2 · features); with
spread s, ‖x‖² varies by a factor exp(2s) for one standard deviation of t, and the sample-wise factor
‖x‖² + 1 of the gradient with it. A class is told by direction, so t carries no information about it.
"""

import numpy as np

from trials.engine.samples import Samples, Splits, split_all
from trials.spec.catalogue import synthetic_spec
from trials.spec.models import DataSpec

_VALUES_AT_ONCE = 2**20  # values that are held in float64 at a time


def read(data: DataSpec) -> Splits:
    """Draw the data set and split it; features are one channel, shape (1, 1, features).

    Raises:
        SpecError: where it would be too large to hold.
    """
    asked = synthetic_spec(data)
    generator = np.random.default_rng([data.split_seed, 2])
    directions = generator.standard_normal((asked.classes, asked.features))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = generator.integers(0, asked.classes, asked.samples)
    lengths = np.exp(asked.spread * generator.standard_normal(asked.samples))[:, None]
    values = np.empty((asked.samples, asked.features), np.float32)
    step = max(1, _VALUES_AT_ONCE // asked.features)
    for first in range(0, asked.samples, step):
        rows = slice(first, first + step)
        noise = generator.standard_normal(values[rows].shape)
        values[rows] = lengths[rows] * (asked.separation * directions[labels[rows]] + noise)
    return split_all(data, Samples(values[:, None, :], labels), (1, 1, asked.features), asked.classes)
