"""The table is read whatever its order, and nothing is left out in silence."""

import numpy as np
import pyarrow as pa
import pytest

from analysis.table import AnalysisError, read_outcomes
from tests.analysis.simulate import absent, as_table, configs, diverged, line, make_results, make_spec, succeeded
from trials.records import Reason, TrialState


@pytest.fixture
def results():
    spec = make_spec(arms=("none", "norm_like"), batch_sizes=(8, 16, 32), learning_rates=(0.1, 0.3), seeds=[7, 3])
    return spec, make_results(spec, line(-0.01), np.random.default_rng(0))


def test_each_trial_lands_on_its_place_in_the_grid(results):
    spec, trials = results
    outcomes = read_outcomes(as_table(trials), spec)
    assert outcomes.arms == ("none", "norm_like")
    assert outcomes.levels == (8, 16, 32)
    assert outcomes.seeds == (7, 3)
    for trial in trials:
        config = trial.config
        stratum = next(i for i, s in enumerate(outcomes.strata) if s.learning_rate == config.learning_rate)
        place = (
            outcomes.arms.index(config.normaliser),
            stratum,
            outcomes.seeds.index(config.seed),
            outcomes.levels.index(config.batch_size),
        )
        assert outcomes.accuracy[place] == trial.final("test_accuracy")
    assert outcomes.exclusions == ()
    assert outcomes.planned == len(trials) == 24


def test_row_order_does_not_matter(results):
    spec, trials = results
    table = as_table(trials)
    shuffled = table.take(pa.array(np.random.default_rng(1).permutation(len(trials))))
    np.testing.assert_array_equal(read_outcomes(table, spec).accuracy, read_outcomes(shuffled, spec).accuracy)


def test_diverged_trials_count_at_chance_or_are_excluded(results):
    spec, trials = results
    trials[0] = diverged(trials[0])
    outcomes = read_outcomes(as_table(trials), spec)
    chance, excluded = outcomes.under("chance"), outcomes.under("excluded")
    assert np.isfinite(chance).all()
    assert np.isnan(excluded).sum() == 1
    assert chance[np.isnan(excluded)] == 0.1
    assert outcomes.diverged == 1


def test_every_trial_without_an_outcome_is_counted_with_its_reason(results):
    spec, trials = results
    trials[0] = absent(trials[0], TrialState.FAILED, Reason.PACK_ERROR)
    trials[1] = absent(trials[1], TrialState.LOST, Reason.WORKER_LOST)
    trials[2] = absent(trials[2], TrialState.LOST, Reason.STUDY_FAILED)
    trials[3] = absent(trials[3], TrialState.CANCELLED, Reason.STUDY_CANCELLED)
    trials[4] = absent(trials[4], TrialState.PRUNED, Reason.STUDY_CANCELLED)
    trials[5] = succeeded(trials[5].config, None)
    trials[6] = succeeded(trials[6].config, float("nan"))
    del trials[-2:]
    outcomes = read_outcomes(as_table(trials), spec)
    assert sum(e.count for e in outcomes.exclusions) == np.isnan(outcomes.under("chance")).sum() == 9
    assert {e.what: e.count for e in outcomes.exclusions if e.what != "lost trials"} == {
        "failed trials": 1,
        "cancelled trials": 1,
        "pruned trials": 1,
        "succeeded trials": 2,
        "trials without a row": 2,
    }
    assert [e.count for e in outcomes.exclusions if e.what == "lost trials"] == [1, 1]
    assert outcomes.by_state == {
        "succeeded": 17,
        "pruned": 1,
        "diverged": 0,
        "failed": 1,
        "lost": 2,
        "cancelled": 1,
    }


def test_null_levels_are_levels_of_their_own(results):
    spec, trials = results
    table = as_table(trials)
    place = table.column_names.index("width")
    table = table.set_column(place, pa.field("width", pa.int64()), pa.nulls(len(trials), pa.int64()))
    outcomes = read_outcomes(table, spec)
    assert {s.width for s in outcomes.strata} == {None}
    assert np.isfinite(outcomes.accuracy).all()


def test_rows_of_another_study_are_left_out_and_counted(results):
    spec, trials = results
    other = make_spec(arms=("none",), batch_sizes=(64,), learning_rates=(0.1,), seeds=[7])
    outcomes = read_outcomes(as_table([*trials, succeeded(configs(other)[0], 0.5)]), spec)
    assert [(e.what, e.count) for e in outcomes.exclusions] == [("rows of other trials", 1)]


def test_a_trial_with_two_rows_is_refused(results):
    spec, trials = results
    with pytest.raises(AnalysisError, match="two rows"):
        read_outcomes(as_table([*trials, trials[0]]), spec)


def test_a_table_that_is_no_results_table_is_refused(results):
    spec, trials = results
    with pytest.raises(AnalysisError, match="test_accuracy"):
        read_outcomes(as_table(trials).drop_columns(["test_accuracy"]), spec)


def test_an_empty_table_has_no_outcomes(results):
    spec, _ = results
    outcomes = read_outcomes(as_table([]), spec)
    assert outcomes.strata == ()
    assert [(e.what, e.count) for e in outcomes.exclusions] == [("trials without a row", 24)]


def test_attrition_is_counted_per_arm_and_level(results):
    spec, trials = results
    trials = [diverged(t) if (t.config.normaliser, t.config.batch_size) == ("none", 8) else t for t in trials]
    found = {
        (a.normaliser, a.batch_size): (a.planned, a.diverged, a.missing)
        for a in read_outcomes(as_table(trials), spec).attrition
    }
    assert found["none", 8] == (4, 4, 0)
    assert found["norm_like", 32] == (4, 0, 0)
