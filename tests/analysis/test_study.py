"""`analyse` on studies whose truth is known, and on all the ways a study can be too poor for a verdict."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis import analyse
from analysis.result import rounded
from analysis.wording import provisional
from tests.analysis.simulate import (
    absent,
    as_table,
    diverged,
    false_positives,
    line,
    make_results,
    make_spec,
    simulated,
    succeeded,
)
from trials.records import TrialConfig, TrialResult, TrialState

GOLDEN = Path(__file__).parent / "golden"
ARMS = ("none", "layer_norm", "norm_like", "affine_like")
SLOPES = {"none": 0.006, "layer_norm": 0.0, "norm_like": -0.007, "affine_like": -0.02}
HYPOTHESES = [
    {"kind": "batch_size_slope", "arms": ["norm_like", "affine_like"], "direction": "negative"},
    {"kind": "batch_size_slope", "arms": ["none", "layer_norm"], "direction": "positive"},
    {"kind": "batch_size_slope", "arms": ["layer_norm"], "direction": "flat", "smallest_slope": 0.004},
]


def truth(config: TrialConfig) -> float:
    return 0.8 + SLOPES[config.normaliser] * math.log2(config.batch_size / 16)


def hump(config: TrialConfig) -> float:
    return 0.8 - 0.02 * math.log2(config.batch_size / 22.627) ** 2


def arm_of(analysis, name):
    return next(arm for arm in analysis.arms if arm.normaliser == name)


def test_known_slopes_are_found():
    spec = make_spec(arms=ARMS, hypotheses=HYPOTHESES)
    analysis = analyse(simulated(spec, truth), spec)
    assert [arm.verdict for arm in analysis.arms] == ["positive", "flat", "negative", "negative"]
    for arm in analysis.arms:
        assert arm.slope == pytest.approx(SLOPES[arm.normaliser], abs=0.001)
        assert arm.interval is not None
        assert arm.slope is not None
        assert arm.interval[0] < arm.slope < arm.interval[1]
        assert (arm.n_trials, arm.n_seeds) == (120, 5)
        assert arm.excluding_diverged is None
        assert not arm.sensitive_to_diverged
    assert [h.verdict for h in analysis.hypotheses] == ["supported", "contradicted", "supported"]
    assert analysis.exclusions == ()


def test_estimates_are_those_of_scipy():
    """Slope: mean over rates and seeds of linregress; rank correlation: mean of spearmanr (no ties here)."""
    spec = make_spec()
    results = make_results(spec, line(-0.004), np.random.default_rng(3))
    x = np.log2(spec.space.batch_size)
    lines = [
        [next(accuracy(r) for r in results if place(r) == (b, rate, seed)) for b in spec.space.batch_size]
        for rate in spec.space.learning_rate
        for seed in spec.seed_list
    ]
    arm = analyse(as_table(results), spec).arms[0]
    assert arm.slope == rounded(float(np.mean([stats.linregress(x, y).slope for y in lines])))
    assert arm.spearman == pytest.approx(np.mean([stats.spearmanr(x, y).statistic for y in lines]), abs=1e-6)
    assert [p.mean for p in arm.curve] == [rounded(m) for m in np.mean(lines, axis=0)]
    assert [p.n for p in arm.curve] == [20] * 6


def accuracy(result: TrialResult) -> float:
    return result.final("test_accuracy") or 0.0


def place(result: TrialResult) -> tuple[int, float, int]:
    return result.config.batch_size, result.config.learning_rate, result.config.seed


def test_a_hump_is_neither_up_nor_down():
    spec = make_spec(hypotheses=[{"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "negative"}])
    analysis = analyse(simulated(spec, hump), spec)
    assert analysis.arms[0].verdict in ("flat", "undecided")
    assert analysis.hypotheses[0].verdict != "supported"
    assert analysis.arms[0].p_value is not None
    assert analysis.arms[0].p_value > 0.2


def test_noise_too_large_for_a_verdict_is_undecided():
    spec = make_spec(seeds=3)
    arm = analyse(simulated(spec, line(0.0), noise=0.1), spec).arms[0]
    assert arm.verdict == "undecided"
    assert "contains zero" in arm.reason


def test_a_slope_that_differs_between_learning_rates_is_averaged_within_them():
    """Pooling over learning rates would see the same slope; reading across them must not change it."""
    spec = make_spec(learning_rates=(0.01, 0.1))
    table = simulated(spec, lambda c: (0.3 if c.learning_rate < 0.05 else 0.7) - 0.01 * math.log2(c.batch_size / 16))
    assert analyse(table, spec).arms[0].slope == pytest.approx(-0.01, abs=0.001)


# -- within each learning rate ---------------------------------------------------------------

RATES = (0.01, 0.03, 0.1, 0.3)


def by_rate(*slopes):
    """A truth with one slope per learning rate of `RATES`, the same for every arm."""
    of = dict(zip(RATES, slopes, strict=True))
    return lambda config: line(of[config.learning_rate], 0.7)(config)


def claims(*directions, arms=("norm_like",), **terms):
    return [{"kind": "batch_size_slope", "arms": list(arms), "direction": d, **terms} for d in directions]


def test_slopes_within_learning_rates_are_those_of_scipy_and_average_to_the_arms():
    spec = make_spec(width=[16, 32], seeds=4)
    results = make_results(spec, by_rate(-0.01, -0.01, 0.0, 0.03), np.random.default_rng(6))
    arm = analyse(as_table(results), spec).arms[0]
    x = np.log2(spec.space.batch_size)
    for found in arm.by_learning_rate:
        slopes = [  # a seed's slope is the mean over widths
            np.mean([stats.linregress(x, [accuracy(r) for r in of_line(results, found, w, s)]).slope for w in (16, 32)])
            for s in spec.seed_list
        ]
        assert found.slope == rounded(float(np.mean(slopes)))
    assert arm.slope == pytest.approx(mean_slope(arm), abs=2e-6)
    assert [r.learning_rate for r in arm.by_learning_rate] == list(RATES)
    falls, again, neither, rises = (r.direction for r in arm.by_learning_rate)
    assert (falls, again, rises) == ("falls", "falls", "rises")
    assert neither in ("unclear", "flat")


def test_a_learning_rates_interval_is_that_of_a_study_of_it_alone_with_the_same_resamples():
    """A study of one learning rate has one slope, so its two intervals are the same to the last digit."""
    spec = make_spec(learning_rates=(0.1,), width=[16, 32])
    arm = analyse(simulated(spec, line(-0.003), noise=0.02), spec).arms[0]
    (rate,) = arm.by_learning_rate
    assert (rate.slope, rate.interval) == (arm.slope, arm.interval)
    assert rate.interval is not None


def mean_slope(arm):
    return float(np.mean([rate.slope for rate in arm.by_learning_rate if rate.slope is not None]))


def of_line(results, found, width, seed):
    at = [
        r
        for r in results
        if (r.config.learning_rate, r.config.width, r.config.seed) == (found.learning_rate, width, seed)
    ]
    return sorted(at, key=lambda r: r.config.batch_size)


def test_a_combined_slope_is_no_answer_where_learning_rates_disagree():
    """The demo's case: falls at small learning rates, rises more steeply at large ones."""
    spec = make_spec(hypotheses=claims("positive", "negative"))
    analysis = analyse(simulated(spec, by_rate(-0.01, -0.01, 0.04, 0.04)), spec)
    arm = analysis.arms[0]
    assert arm.verdict == "positive"
    assert arm.slope == pytest.approx(0.015, abs=0.001)
    assert arm.mixed_over_learning_rates
    assert "not at every learning rate: accuracy falls at 0.01 and 0.03 and rises at 0.1 and 0.3" in arm.reason
    for hypothesis in analysis.hypotheses:
        assert (hypothesis.verdict, hypothesis.mixed_over_learning_rates) == ("undecided", True)
        assert "for norm_like it falls at 0.01 and 0.03 and rises at 0.1 and 0.3." in hypothesis.sentence


def test_rises_and_falls_that_cancel_are_not_flat():
    spec = make_spec(hypotheses=claims("flat"))
    analysis = analyse(simulated(spec, by_rate(-0.02, -0.02, 0.02, 0.02), noise=0.002), spec)
    assert analysis.arms[0].verdict == "flat"
    assert analysis.arms[0].mixed_over_learning_rates
    assert analysis.hypotheses[0].verdict == "undecided"


def test_a_clear_arm_contradicts_beside_a_mixed_one():
    spec = make_spec(arms=("none", "norm_like"), hypotheses=claims("positive", arms=("none", "norm_like")))
    mixed, falling = by_rate(-0.01, -0.01, 0.04, 0.04), line(-0.01, 0.7)
    table = simulated(spec, lambda c: (mixed if c.normaliser == "none" else falling)(c))
    hypothesis = analyse(table, spec).hypotheses[0]
    assert hypothesis.verdict == "contradicted"
    assert "“none” cannot be decided" in hypothesis.sentence
    assert "for “none” it falls at 0.01 and 0.03 and rises at 0.1 and 0.3." in hypothesis.sentence


def test_learning_rates_that_differ_in_steepness_alone_are_not_mixed():
    spec = make_spec(hypotheses=claims("negative"))
    analysis = analyse(simulated(spec, by_rate(-0.04, -0.02, -0.01, -0.005)), spec)
    assert not analysis.arms[0].mixed_over_learning_rates
    assert analysis.hypotheses[0].verdict == "supported"
    assert "learning rate" not in analysis.hypotheses[0].sentence


def test_a_rise_too_small_to_matter_does_not_qualify_a_fall():
    spec = make_spec(hypotheses=claims("negative", smallest_slope=0.004))
    analysis = analyse(simulated(spec, by_rate(-0.02, -0.02, -0.02, 0.002), noise=0.001), spec)
    assert [r.direction for r in analysis.arms[0].by_learning_rate] == ["falls", "falls", "falls", "flat"]
    interval = analysis.arms[0].by_learning_rate[-1].interval
    assert interval is not None
    assert interval[0] > 0
    assert analysis.hypotheses[0].verdict == "supported"


def test_one_seed_has_slopes_within_learning_rates_but_no_direction():
    spec = make_spec(seeds=1)
    arm = analyse(simulated(spec, by_rate(-0.02, -0.02, 0.02, 0.02)), spec).arms[0]
    assert [r.direction for r in arm.by_learning_rate] == ["unclear"] * 4
    assert [r.slope for r in arm.by_learning_rate] == pytest.approx([-0.02, -0.02, 0.02, 0.02], abs=0.005)
    assert not arm.mixed_over_learning_rates


def test_a_learning_rate_without_two_batch_sizes_has_no_slope():
    spec = make_spec()
    results = make_results(spec, line(-0.01), np.random.default_rng(0))
    results = [absent(r) if r.config.learning_rate == 0.3 and r.config.batch_size > 4 else r for r in results]
    arm = analyse(as_table(results), spec).arms[0]
    last = arm.by_learning_rate[-1]
    assert (last.slope, last.interval, last.direction) == (None, None, "unclear")
    assert arm.slope == pytest.approx(mean_slope(arm), abs=2e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(-0.02, 0.02), st.floats(-0.02, 0.02))
def test_an_arms_slope_is_the_mean_of_its_slopes_within_learning_rates(seed, first, last):
    spec = make_spec(seeds=3, hypotheses=claims("positive"))
    analysis = analyse(simulated(spec, by_rate(first, first, last, last), seed), spec, resamples=199)
    arm, hypothesis = analysis.arms[0], analysis.hypotheses[0]
    assert arm.slope == pytest.approx(mean_slope(arm), abs=2e-6)
    directions = {r.direction for r in arm.by_learning_rate}
    assert arm.mixed_over_learning_rates == ({"falls", "rises"} <= directions)
    assert hypothesis.mixed_over_learning_rates == arm.mixed_over_learning_rates
    assert hypothesis.verdict == "undecided" or not arm.mixed_over_learning_rates


# -- diverged trials -------------------------------------------------------------------------


def diverging(spec, which, slope=-0.01, seed=0):
    results = make_results(spec, line(slope), np.random.default_rng(seed))
    return as_table([diverged(r) if which(r.config) else r for r in results])


def test_diverged_trials_can_turn_the_verdict_and_it_says_so():
    """True slope −1 point; small batches diverge at the largest rate, so at chance the slope is upward."""
    spec = make_spec(hypotheses=[{"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "negative"}])
    table = diverging(spec, lambda c: c.learning_rate == 0.3 and c.batch_size <= 8)
    analysis = analyse(table, spec)
    arm, hypothesis = analysis.arms[0], analysis.hypotheses[0]
    assert arm.verdict == "positive"
    assert arm.excluding_diverged is not None
    assert arm.excluding_diverged.verdict == "negative"
    assert arm.excluding_diverged.n_trials == 110
    assert arm.sensitive_to_diverged
    assert arm.mixed_over_learning_rates  # at the largest rate alone it rises
    assert not arm.excluding_diverged.mixed_over_learning_rates
    assert hypothesis.verdict == "undecided"
    assert hypothesis.verdict_excluding_diverged == "supported"
    assert hypothesis.sensitive_to_diverged
    assert "10 diverged trials" in hypothesis.sentence
    assert {e.what for e in analysis.exclusions} == {"diverged trials", "uneven attrition: 10 diverged trials"}


def test_diverged_trials_that_change_nothing_are_still_reported():
    spec = make_spec()
    table = diverging(spec, lambda c: c.learning_rate == 0.3 and c.batch_size == 128 and c.seed == 0, slope=-0.02)
    arm = analyse(table, spec).arms[0]
    assert arm.verdict == "negative"
    assert arm.excluding_diverged is not None
    assert arm.excluding_diverged.verdict == "negative"
    assert not arm.sensitive_to_diverged


def test_every_trial_diverges():
    spec = make_spec(arms=ARMS, hypotheses=HYPOTHESES)
    analysis = analyse(diverging_all(spec), spec)
    for arm in analysis.arms:
        assert (arm.slope, arm.interval, arm.p_value, arm.p_holm, arm.spearman) == (None,) * 5
        assert arm.verdict == "undecided"
        assert "zero variance" in arm.reason
        assert arm.excluding_diverged is not None
        assert "no trial has an outcome" in arm.excluding_diverged.reason
    assert {h.verdict for h in analysis.hypotheses} == {"undecided"}
    json.dumps(analysis.to_dict(), allow_nan=False)


def diverging_all(spec):
    return as_table([diverged(r) for r in make_results(spec, truth, np.random.default_rng(0))])


# -- not computable --------------------------------------------------------------------------


def test_one_seed_has_no_interval_and_no_p_value():
    spec = make_spec(seeds=1)
    arm = analyse(simulated(spec, line(-0.02)), spec).arms[0]
    assert (arm.interval, arm.p_value, arm.p_holm) == (None, None, None)
    assert arm.verdict == "undecided"
    assert "one seed" in arm.reason
    assert all(point.interval is None for point in arm.curve)


def test_one_level_has_no_slope():
    spec = make_spec(batch_sizes=(16,))
    arm = analyse(simulated(spec, line(-0.02)), spec).arms[0]
    assert (arm.slope, arm.interval, arm.p_value, arm.spearman) == (None,) * 4
    assert "two batch sizes" in arm.reason
    assert arm.curve[0].mean == pytest.approx(0.8, abs=0.05)


def test_seeds_that_agree_exactly_have_no_interval():
    spec = make_spec()
    arm = analyse(simulated(spec, line(-0.02), noise=0, seed_level=0), spec).arms[0]
    assert (arm.interval, arm.p_value) == (None, None)
    assert "exactly the same slope" in arm.reason


def test_too_few_relabellings_cannot_decide_whatever_the_slope():
    spec = make_spec(batch_sizes=(8, 16), seeds=5)
    arm = analyse(simulated(spec, line(-0.05)), spec).arms[0]
    assert arm.interval is not None
    assert arm.interval[1] < 0
    assert arm.smallest_p == pytest.approx(2 / 2**5)
    assert arm.verdict == "undecided"
    assert "this design cannot decide" in arm.reason


def test_an_empty_table_is_answered():
    spec = make_spec(arms=ARMS, hypotheses=HYPOTHESES)
    analysis = analyse(as_table([]), spec)
    assert {arm.verdict for arm in analysis.arms} == {"undecided"}
    assert analysis.chance_accuracy is None
    json.dumps(analysis.to_dict(), allow_nan=False)


# -- missing trials --------------------------------------------------------------------------


def test_lost_trials_are_reported_and_the_slope_stays_right():
    """The lost cells are of one rate with its own accuracy: an unbalanced mean would bend the slope."""
    spec = make_spec(learning_rates=(0.01, 0.1))
    results = make_results(
        spec, lambda c: line(-0.01, 0.4 if c.learning_rate == 0.01 else 0.8)(c), np.random.default_rng(0)
    )
    results = [
        absent(r) if r.config.learning_rate == 0.01 and r.config.batch_size == 128 and r.config.seed < 2 else r
        for r in results
    ]
    analysis = analyse(as_table(results), spec)
    arm = analysis.arms[0]
    assert arm.slope == pytest.approx(-0.01, abs=0.001)
    assert arm.n_trials == 55
    whats = {e.what: e.count for e in analysis.exclusions}
    assert whats == {"lost trials": 2, "trials left out for balance": 3, "uneven attrition: 2 missing trials": 2}
    assert [p.n for p in arm.curve] == [5] * 6  # only the rate that has every batch size
    curve = [p.mean for p in arm.curve]
    assert all(m is not None and m > 0.7 for m in curve)


def test_a_level_that_is_gone_is_named():
    spec = make_spec()
    results = make_results(spec, line(-0.01), np.random.default_rng(0))
    results = [absent(r, TrialState.CANCELLED) if r.config.batch_size == 128 else r for r in results]
    analysis = analyse(as_table(results), spec)
    assert analysis.arms[0].batch_sizes == (4, 8, 16, 32, 64)
    assert any(e.what == "batch sizes not used: 128" for e in analysis.exclusions)
    assert analysis.arms[0].curve[-1].mean is None


# -- invariances -----------------------------------------------------------------------------

SMALL = make_spec(
    arms=("none", "norm_like"),
    batch_sizes=(8, 16, 32),
    learning_rates=(0.03, 0.1),
    seeds=4,
    hypotheses=[{"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "negative"}],
)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.randoms(use_true_random=False))
def test_row_order_changes_nothing(seed, random):
    table = simulated(SMALL, line(-0.005), seed)
    order = list(range(table.num_rows))
    random.shuffle(order)
    shuffled = table.take(pa.array(order))
    assert analyse(table, SMALL, resamples=199) == analyse(shuffled, SMALL, resamples=199)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(-0.1, 0.1))
def test_a_constant_moves_the_curve_and_nothing_else(seed, constant):
    results = make_results(SMALL, line(-0.005, 0.5), np.random.default_rng(seed))
    moved = [succeeded(r.config, accuracy(r) + constant) for r in results]
    one, other = (analyse(as_table(r), SMALL, resamples=199) for r in (results, moved))
    for a, b in zip(one.arms, other.arms, strict=True):
        assert a.slope == pytest.approx(b.slope, abs=2e-6)
        assert a.interval == pytest.approx(b.interval, abs=2e-6)
        assert (a.p_value, a.verdict) == (b.p_value, b.verdict)
        assert b.curve[0].mean == pytest.approx((a.curve[0].mean or 0) + constant, abs=2e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.permutations(["none", "layer_norm", "norm_like"]))
def test_an_arm_does_not_depend_on_the_order_of_arms(seed, order):
    """The order is part of the spec's hash, so random draws differ; estimates may not."""
    results = make_results(make_spec(arms=order, seeds=3), line(-0.003), np.random.default_rng(seed))
    one = analyse(as_table(results), make_spec(arms=order, seeds=3), resamples=99)
    other = analyse(as_table(results), make_spec(arms=sorted(order), seeds=3), resamples=99)
    for arm in one.arms:
        twin = arm_of(other, arm.normaliser)
        assert (arm.slope, arm.spearman, arm.n_trials) == (twin.slope, twin.spearman, twin.n_trials)


def test_the_same_table_and_spec_give_the_same_figures_to_the_last_digit():
    table = simulated(SMALL, line(-0.005))
    assert analyse(table, SMALL).to_dict() == analyse(table, SMALL).to_dict()


def test_names_do_not_reach_the_figures_but_seeds_do():
    table = simulated(SMALL, line(-0.001), noise=0.02)
    renamed = SMALL.model_copy(update={"name": "another name"})
    assert analyse(table, SMALL).arms == analyse(table, renamed).arms


def test_swapping_two_batch_sizes_flips_the_slope():
    spec = make_spec(batch_sizes=(8, 32))
    results = make_results(spec, line(-0.01), np.random.default_rng(0))
    of = {(*place(r)[1:], r.config.batch_size): accuracy(r) for r in results}
    swapped = [succeeded(r.config, of[(*place(r)[1:], 40 - r.config.batch_size)]) for r in results]
    one, other = (analyse(as_table(r), spec).arms[0].slope for r in (results, swapped))
    assert one is not None
    assert other == pytest.approx(-one)


# -- each hypothesis by its own smallest slope and alpha -------------------------------------


def test_each_hypothesis_is_judged_by_its_own_terms():
    terms = {"kind": "batch_size_slope", "arms": ["norm_like"], "direction": "flat"}
    spec = make_spec(
        hypotheses=[terms | {"smallest_slope": 0.01, "alpha": 0.2}, terms | {"smallest_slope": 0.001, "alpha": 0.01}]
    )
    analysis = analyse(simulated(spec, line(-0.004)), spec)
    assert [h.verdict for h in analysis.hypotheses] == ["supported", "contradicted"]
    wide, narrow = (h.judgements[0].interval for h in analysis.hypotheses)
    assert wide is not None
    assert narrow is not None
    assert narrow[1] - narrow[0] > wide[1] - wide[0]
    assert analysis.arms[0].verdict == "flat"  # by the first hypothesis that names it
    assert (analysis.arms[0].alpha, analysis.arms[0].smallest_slope) == (0.2, 0.01)
    assert analysis.arms[0].interval == wide


# -- verdict.json ----------------------------------------------------------------------------


def shape(value):
    """Keys and kinds of a JSON value, not its numbers; of a list, its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def full_study():
    spec = make_spec(arms=ARMS, hypotheses=HYPOTHESES)
    table = diverging(spec, lambda c: c.learning_rate == 0.3 and c.batch_size == 4 and c.seed == 1)
    return spec, table


def test_the_form_of_verdict_json_is_the_golden_one():
    """Readers of verdict.json depend on this form: extend it, rename nothing."""
    spec, table = full_study()
    found = shape(analyse(table, spec).to_dict())
    assert found == json.loads((GOLDEN / "verdict_shape.json").read_text())


def test_verdict_json_is_strict_json_and_survives_a_round_trip():
    spec, table = full_study()
    document = analyse(table, spec).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_the_confounding_of_batch_size_and_steps_is_stated():
    spec, table = full_study()
    assert (
        "At fixed epochs a larger batch takes fewer optimiser steps; this study's design does not separate the two."
        in analyse(table, spec).methods
    )


# -- calibration -----------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [{}, {"shared": 0.01}, {"seed_slope": 0.005}], ids=["plain", "shared", "seed slopes"])
def test_false_positives_are_at_most_alpha(noise):
    """Family-wise over three arms; simulate.py has the larger measurement."""
    studies = 250
    decided, _, answered = false_positives(studies, np.random.default_rng(21), resamples=299, **noise)
    assert decided <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    assert answered <= decided


def test_slopes_opposed_between_learning_rates_answer_nothing():
    """The combined slope is null, each learning rate's is not: arms err at most at alpha, claims never here."""
    studies = 100
    decided, _, answered = false_positives(
        studies, np.random.default_rng(22), 1, resamples=299, rate_slopes=(-0.02, 0.02)
    )
    assert decided <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    assert answered == 0


@pytest.mark.parametrize(
    ("by_state", "line"),
    [
        ({"succeeded": 42, "cancelled": 30}, "Provisional: 30 of 72 planned trials have no result (30 cancelled)."),
        (
            {"succeeded": 60, "diverged": 5, "failed": 2, "lost": 5, "cancelled": 0},
            "Provisional: 7 of 72 planned trials have no result (5 lost and 2 failed).",
        ),
        ({"succeeded": 71, "lost": 1}, "Provisional: 1 of 72 planned trials has no result (1 lost)."),
        ({"succeeded": 70, "diverged": 2, "lost": 0}, None),
    ],
)
def test_part_of_a_plan_gives_a_provisional_answer(by_state: dict[str, int], line: str | None):
    assert provisional(72, by_state) == line
