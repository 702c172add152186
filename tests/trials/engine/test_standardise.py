"""Standardisation by the training split: the same for bytes and for floats."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.engine.errors import DataError
from trials.engine.standardise import standardiser


@settings(max_examples=25, deadline=None)
@given(
    samples=st.integers(1, 30),
    channels=st.integers(1, 4),
    pixels=st.integers(1, 9),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_floats_and_bytes_of_the_same_values_agree(samples: int, channels: int, pixels: int, seed: int, dtype: type):
    generator = np.random.default_rng(seed)
    train = generator.integers(0, 256, (samples, channels, pixels), dtype=np.uint8)
    other = generator.integers(0, 256, (5, channels, pixels), dtype=np.uint8)
    by_bytes, by_floats = standardiser(train), standardiser(train.astype(dtype))
    for values in (train, other):
        got = by_floats(values.astype(dtype))
        assert (got.dtype, got.shape) == (np.float32, (len(values), channels * pixels))
        np.testing.assert_allclose(got, by_bytes(values), rtol=1e-6, atol=1e-6)


def test_each_channel_has_mean_0_and_deviation_1_far_from_the_origin_and_over_many_parts():
    generator = np.random.default_rng(0)
    train = generator.standard_normal((700, 2, 2000)) * np.array([[1e-3], [50.0]]) + np.array([[1e6], [-3.0]])
    got = standardiser(train)(train).reshape(700, 2, 2000).astype(np.float64)
    np.testing.assert_allclose(got.mean((0, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(got.std((0, 2)), 1, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e30, 0.0])
def test_a_constant_channel_becomes_exactly_0(value: float):
    """A mean that is off by one rounding would make a deviation of 1e-17, and every value ±1."""
    train = np.full((37, 2, 3), value)
    train[:, 1] = np.arange(3)
    got = standardiser(train)(train).reshape(37, 2, 3)
    assert not got[:, 0].any()
    assert got[:, 1].any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="variance is not finite"):
        standardiser(np.array([[[1e200]], [[-1e200]]]))
    standardise = standardiser(np.array([[[1e-20]], [[-1e-20]]]))
    with pytest.raises(DataError, match="channel 0 is so far"):
        standardise(np.array([[[1e25]]]))
