"""Intervals and p-values against scipy's, theory and simulated truth."""

import itertools

import numpy as np
import pytest
from scipy import stats

from analysis.estimators import balanced, seed_slopes, slope_weights
from analysis.resampling import bootstrap, permutation_test, seeds_test, stream
from tests.analysis.simulate import coverage


def test_one_stream_per_study_and_purpose():
    first, again = stream("a" * 64, "bootstrap"), stream("a" * 64, "bootstrap")
    assert first.integers(2**60) == again.integers(2**60)
    draws = {stream(h, p).integers(2**60) for h in ("a", "b") for p in ("bootstrap", "permutation/none")}
    assert len(draws) == 4


def test_the_bootstrap_distribution_is_scipys():
    values = np.random.default_rng(0).normal(size=(6, 1))
    ours = bootstrap(values, np.random.default_rng(1), 20_000)
    theirs = stats.bootstrap((values[:, 0],), np.mean, n_resamples=20_000, rng=np.random.default_rng(2))
    quantiles = [0.025, 0.25, 0.5, 0.75, 0.975]
    np.testing.assert_allclose(
        np.quantile(ours.draws[:, 0], quantiles), np.quantile(theirs.bootstrap_distribution, quantiles), atol=0.03
    )


def test_columns_are_resampled_together():
    values = np.random.default_rng(0).normal(size=(5, 1))
    draws = bootstrap(np.hstack([values, 2 * values]), np.random.default_rng(1), 200).draws
    np.testing.assert_allclose(draws[:, 1], 2 * draws[:, 0])


def test_chunks_change_nothing_but_the_draws_order(monkeypatch):
    values = np.random.default_rng(0).normal(size=(5, 2))
    whole = bootstrap(values, np.random.default_rng(1), 300).draws
    monkeypatch.setattr("analysis.resampling._CHUNK", 40)
    np.testing.assert_allclose(bootstrap(values, np.random.default_rng(1), 300).draws, whole)


def test_the_interval_is_near_students_for_normal_values():
    values = np.random.default_rng(3).normal(size=(30, 1))
    low, high = bootstrap(values, np.random.default_rng(4), 20_000).interval(0, 0.05) or (0, 0)
    student = stats.ttest_1samp(values[:, 0], 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((student.low, student.high), abs=0.06)


@pytest.mark.parametrize("values", [[[0.3]], [[0.3], [0.3], [0.3]]], ids=["one seed", "no spread"])
def test_no_interval_where_none_can_be_computed(values):
    assert bootstrap(np.array(values), np.random.default_rng(0), 99).interval(0, 0.05) is None


def test_the_test_over_seeds_is_scipys():
    slopes = np.random.default_rng(14).normal(0.5, 1, 7)
    assert seeds_test(slopes) == pytest.approx(stats.ttest_1samp(slopes, 0).pvalue, rel=1e-12)


def test_coverage_at_five_seeds():
    """Published in docs/science.md; simulate.py has the larger measurement."""
    ours, plain = coverage(5, 3000, np.random.default_rng(11))
    assert ours == pytest.approx(0.944, abs=3 * (0.944 * 0.056 / 3000) ** 0.5)
    assert plain < 0.87


def all_relabellings(values, weights):
    """The exact two-sided p-value by enumeration; the same relabelling for every stratum of a seed."""
    levels = values.shape[2]
    observed = np.einsum("ksl,sl->", values, weights)
    hits = total = 0
    for orders in itertools.product(itertools.permutations(range(levels)), repeat=len(values)):
        moved = np.stack([seed[:, list(order)] for seed, order in zip(values, orders, strict=True)])
        hits += abs(np.einsum("ksl,sl->", moved, weights)) >= abs(observed) - 1e-12
        total += 1
    return hits / total


def test_the_p_value_is_that_of_all_joint_relabellings():
    rng = np.random.default_rng(5)
    values = rng.normal(size=(3, 2, 3)) + 0.5 * np.arange(3)
    weights = slope_weights(np.ones((2, 3), dtype=bool), np.array([8, 16, 32]))
    ours = permutation_test(values, weights, np.random.default_rng(6), 40_000).p_value
    assert ours == pytest.approx(all_relabellings(values, weights), abs=0.01)


def test_one_stratum_and_seed_agrees_with_scipy():
    levels = np.array([4, 8, 16, 32, 64, 128])
    values = np.array([0.71, 0.74, 0.69, 0.68, 0.66, 0.67])
    theirs = stats.permutation_test(
        (np.log2(levels),),
        lambda x: stats.linregress(x, values).slope,
        permutation_type="pairings",
        n_resamples=1000,  # more than 6!, hence exact
    )
    weights = slope_weights(np.ones((1, 6), dtype=bool), levels)
    ours = permutation_test(values[None, None], weights, np.random.default_rng(7), 20_000).p_value
    assert ours == pytest.approx(theirs.pvalue, abs=0.01)


def test_strata_of_a_seed_are_relabelled_together():
    """Strata that are copies of each other are one observation, and must not look like many."""
    one = np.random.default_rng(8).normal(size=(4, 1, 4)) + 0.4 * np.arange(4)
    levels = np.array([8, 16, 32, 64])
    alone = permutation_test(one, slope_weights(np.ones((1, 4), dtype=bool), levels), np.random.default_rng(9), 5000)
    copies = np.repeat(one, 5, axis=1)
    joint = permutation_test(copies, slope_weights(np.ones((5, 4), dtype=bool), levels), np.random.default_rng(9), 5000)
    assert joint.p_value == alone.p_value


def test_levels_are_exchanged_only_with_levels_of_the_same_strata():
    """Stratum 1 lacks level 0: level 0 stays, levels 1 and 2 are exchanged, so 3 seeds have 2³ relabellings."""
    values = np.random.default_rng(10).normal(size=(3, 2, 3))
    values[:, 1, 0] = np.nan
    block = balanced(values)
    weights = slope_weights(block.cells, np.array([8, 16, 32]))
    found = permutation_test(block.values, weights, np.random.default_rng(0), 4000)
    assert found.smallest_p == pytest.approx(1 / 8)
    found_by_hand = [
        np.nansum(np.stack([s[:, list(o)] for s, o in zip(values, orders, strict=True)]) * weights)
        for orders in itertools.product([(0, 1, 2), (0, 2, 1)], repeat=3)
    ]
    statistic = np.array(found_by_hand)
    extreme = np.abs(statistic - np.mean(statistic)) >= abs(statistic[0] - np.mean(statistic)) - 1e-12
    assert found.p_value == pytest.approx(extreme.mean(), abs=0.03)
    assert seed_slopes(block, weights).sum() == pytest.approx(statistic[0])


@pytest.mark.parametrize(
    ("seeds", "levels", "smallest"),
    [(5, [8, 16], 2 / 2**5), (3, [8, 16, 32], 2 / 6**3), (2, [8, 16, 64], 1 / 6**2), (5, [4, 8, 16, 32], 1 / 1000)],
)
def test_the_smallest_p_value_is_known(seeds, levels, smallest):
    """Two relabellings are the most extreme, save where the spacing (8, 16, 64) has no mirror image."""
    weights = slope_weights(np.ones((1, len(levels)), dtype=bool), np.array(levels))
    perfect = np.tile(np.arange(len(levels), dtype=float), (seeds, 1, 1))
    found = permutation_test(perfect, weights, np.random.default_rng(0), 999)
    assert found.smallest_p == pytest.approx(smallest)
    assert found.p_value >= 1 / 1000


def test_p_values_are_uniform_under_the_null():
    rng = np.random.default_rng(12)
    weights = slope_weights(np.ones((2, 4), dtype=bool), np.array([8, 16, 32, 64]))
    shared = rng.normal(size=(400, 4, 1, 4))  # strata of a seed share noise
    values = shared + 0.3 * rng.normal(size=(400, 4, 2, 4))
    found = [permutation_test(v, weights, rng, 199).p_value for v in values]
    assert stats.kstest(found, "uniform").pvalue > 0.01
    assert np.mean(np.array(found) <= 0.05) <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5
