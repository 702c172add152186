"""Slopes and rank correlations against scipy's, and the balance of blocks with holes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from analysis.estimators import balanced, curve_columns, seed_slopes, slope_weights, spearman

LEVELS = np.array([4, 8, 16, 64])


def block_of(seeds=5, strata=3, levels=4, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 0.9, (seeds, strata, levels))


def scipy_slopes(values, levels):
    """Per seed: the mean over strata of scipy's least-squares slope."""
    slopes = []
    for seed in values:
        lines = [(np.log2(levels[np.isfinite(y)]), y[np.isfinite(y)]) for y in seed]
        slopes.append(np.mean([stats.linregress(x, y).slope for x, y in lines if len(x) > 1]))
    return np.array(slopes)


def test_slopes_are_those_of_scipy():
    block = balanced(block_of())
    slopes = seed_slopes(block, slope_weights(block.cells, LEVELS))
    np.testing.assert_allclose(slopes, scipy_slopes(block.values, LEVELS), rtol=1e-12)


def test_slopes_are_those_of_scipy_where_cells_are_missing():
    values = block_of()
    values[:, 0, 1] = np.nan  # a cell no seed has
    values[:, 2, 1:] = np.nan  # a stratum with one level: no slope
    block = balanced(values)
    assert block.strata.tolist() == [True, True, False]
    slopes = seed_slopes(block, slope_weights(block.cells, LEVELS))
    np.testing.assert_allclose(slopes, scipy_slopes(values, LEVELS), rtol=1e-12)


def test_spearman_of_one_block_is_scipys_with_ties():
    values = np.array([[[0.5, 0.7, 0.5, 0.9]]])
    expected = stats.spearmanr(LEVELS, values[0, 0]).statistic
    assert spearman(balanced(values)) == pytest.approx(expected, rel=1e-12)


def test_spearman_without_ties_is_the_mean_over_blocks():
    values = block_of(seed=3)
    expected = np.mean([stats.spearmanr(LEVELS, y).statistic for y in values.reshape(-1, 4)])
    assert spearman(balanced(values)) == pytest.approx(expected, rel=1e-12)


def test_spearman_of_equal_accuracies_is_not_a_number_we_give():
    assert spearman(balanced(np.full((3, 2, 4), 0.1))) is None


def test_a_full_block_stays_whole():
    values = block_of()
    block = balanced(values)
    np.testing.assert_array_equal(block.values, values)
    assert block.left_out == 0
    assert block.cells_dropped == block.seeds_dropped == ()


def test_one_missing_trial_costs_its_cell_not_a_seed():
    values = block_of()
    values[2, 1, 3] = np.nan
    block = balanced(values)
    assert block.cells_dropped == ((1, 3),)
    assert block.left_out == 4
    assert len(block.seeds) == 5


def test_a_seed_that_lost_most_goes():
    values = block_of()
    values[2, :, 1:] = np.nan
    block = balanced(values)
    assert block.seeds_dropped == (2,)
    assert block.left_out == 3
    assert block.cells.all()


def test_nothing_at_all_gives_an_empty_block():
    block = balanced(np.full((3, 2, 4), np.nan))
    assert len(block.seeds) == 0
    assert not block.strata.any()


@given(st.integers(0, 10_000), st.floats(0.05, 0.9))
def test_balanced_blocks_have_no_holes_and_lose_no_more_than_they_say(seed, share):
    rng = np.random.default_rng(seed)
    values = rng.uniform(size=(4, 3, 4))
    values[rng.uniform(size=values.shape) < share] = np.nan
    block = balanced(values)
    there = np.isfinite(block.values)
    assert (there == there.all(axis=0)).all()
    assert there.sum() + block.left_out == np.isfinite(values).sum()


@given(st.integers(0, 10_000), st.floats(-0.2, 0.2))
def test_a_constant_changes_neither_slope_nor_rank_correlation(seed, constant):
    values = block_of(seed=seed)
    one, other = balanced(values), balanced(values + constant)
    weights = slope_weights(one.cells, LEVELS)
    np.testing.assert_allclose(seed_slopes(one, weights), seed_slopes(other, weights), atol=1e-12)
    assert spearman(one) == pytest.approx(spearman(other), abs=1e-12)


def test_the_curve_keeps_to_strata_that_have_every_level():
    values = np.full((2, 2, 3), 0.5)
    values[:, 1, :] = 0.9
    values[:, 1, 2] = np.nan  # the better stratum lacks a level: it must not bend the curve
    means, counts = curve_columns(balanced(values), np.array([True, True]))
    np.testing.assert_allclose(means, 0.5)
    assert counts.tolist() == [2, 2, 2]
