"""A pack's numbers: against solo runs, against plain PyTorch, and one lane against another's ruin."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trials.engine.plain import make_dataset, make_pack, plain_training
from trials.engine import Dataset, PackRun, Split, fused, train
from trials.engine.checkpoints import CheckpointError
from trials.engine.fused_mlp import initial_parameters
from trials.engine.general import GeneralTrainer
from trials.records import METRICS, Pack, Reason, TrialResult, TrialState

NORMALISERS = (
    "none",
    "batch_norm",
    "layer_norm",
    "rms_norm",
    "norm_like",
    "norm_like_half",
    "affine_like",
    "gradient_only",
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(pack: Pack, dataset: Dataset, **options) -> tuple[TrialResult, ...]:
    pack_run = PackRun(pack, dataset, **options)
    while not pack_run.finished:
        pack_run.step()
    return pack_run.results()


def solo(pack: Pack, index: int) -> Pack:
    return replace(pack, trials=(pack.trials[index],))


def assert_curves_close(got: TrialResult, expected: dict, tolerance: float) -> None:
    for metric in METRICS:
        np.testing.assert_allclose(
            np.array(got.curves[metric], float), np.array(expected[metric], float), rtol=tolerance, atol=tolerance
        )


SHAPES = [(0, "tanh", 4), (1, "tanh", 1), (1, "relu", 8), (2, "gelu", 4), (3, "leaky_relu", 16), (2, "identity", 64)]


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize(("depth", "activation", "batch_size"), SHAPES)
def test_lanes_equal_plain_pytorch_over_a_whole_training(normaliser, depth, activation, batch_size):
    """In float64, where only a wrong formula can make a difference."""
    if normaliser == "batch_norm":
        batch_size = max(4, batch_size)  # PyTorch refuses one sample, and two become ±1 by the sign of a rounding
    pack = make_pack(depth=depth, activation=activation, batch_size=batch_size, normaliser=normaliser)
    dataset = make_dataset()
    sizes = [13, *[6] * depth, 5]
    for result in run(pack, dataset, dtype=torch.float64):
        expected = plain_training(result.config, dataset, initial_parameters(sizes, result.config.seed), torch.float64)
        assert_curves_close(result, expected, 1e-9)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize(("depth", "activation"), [(0, "tanh"), (1, "tanh"), (2, "relu"), (3, "gelu")])
def test_a_lane_equals_its_solo_run_and_plain_pytorch_in_float32(normaliser, depth, activation):
    """Wide enough, and slow enough, that rounding is not amplified: a sample whose hidden units are
    all but dead is blown up by a normaliser, and two roundings of it part ways."""
    pack = make_pack(
        depth=depth, width=24, activation=activation, normaliser=normaliser, rates=[0.005, 0.02], batch_size=8
    )
    dataset = make_dataset()
    for index, result in enumerate(run(pack, dataset)):
        (alone,) = run(solo(pack, index), dataset)
        assert alone.config == result.config
        assert_curves_close(result, alone.curves, 2e-4)
        parameters = initial_parameters([13, *[24] * depth, 5], result.config.seed)
        assert_curves_close(result, plain_training(result.config, dataset, parameters, torch.float32), 2e-4)


@settings(max_examples=15, deadline=None)
@given(
    batch_size=st.integers(1, 103),
    samples=st.integers(103, 140),
    depth=st.integers(0, 2),
    width=st.integers(1, 9),
    seeds=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3, unique=True),
    normaliser=st.sampled_from(["none", "norm_like", "affine_like"]),
)
def test_any_shape_equals_plain_pytorch(batch_size, samples, depth, width, seeds, normaliser):
    pack = make_pack(
        seeds=seeds, batch_size=batch_size, depth=depth, width=width, normaliser=normaliser, epochs=1, rates=[0.1]
    )
    dataset = make_dataset(train=samples)
    for result in run(pack, dataset, dtype=torch.float64):
        parameters = initial_parameters([13, *[width] * depth, 5], result.config.seed)
        assert_curves_close(result, plain_training(result.config, dataset, parameters, torch.float64), 1e-5)
        assert result.updates == samples // batch_size
        assert result.samples == samples // batch_size * batch_size


def test_evaluation_in_chunks_does_not_change_the_numbers(monkeypatch):
    pack, dataset = make_pack(seeds=[0, 1, 2], normaliser="batch_norm"), make_dataset()
    whole = run(pack, dataset, dtype=torch.float64)
    monkeypatch.setattr(fused, "_EVALUATION_VALUES", 1)
    for got, expected in zip(run(pack, dataset, dtype=torch.float64), whole, strict=True):
        assert_curves_close(got, expected.curves, 1e-12)


# Of what the general path adds to the plain MLP, one of everything.
GENERAL = {
    "momentum": {"optimiser": "momentum", "momentum": 0.9, "normaliser": "batch_norm"},
    "adam": {"optimiser": "adam", "gain": True, "normaliser": "layer_norm"},
    "post": {"placement": "post", "normaliser": "rms_norm", "schedule": "cosine", "schedule_final": 0.1},
}


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("kind", ["fused", *GENERAL])
def test_lanes_at_once_do_not_change_the_numbers(at_once, kind):
    pack = make_pack(seeds=[0, 1, 2], epochs=2, **GENERAL.get(kind, {"normaliser": "batch_norm"}))
    dataset = make_dataset()
    whole = run(pack, dataset, dtype=torch.float64)
    assert len(PackRun(pack, dataset, lanes_at_once=at_once).blocks) >= 9 / at_once
    for got, expected in zip(run(pack, dataset, dtype=torch.float64, lanes_at_once=at_once), whole, strict=True):
        assert (got.lanes_at_once, expected.lanes_at_once) == (at_once, 9)
        assert_curves_close(got, expected.curves, 1e-10)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_the_fast_path_and_autograd_agree(monkeypatch, normaliser):
    """Two implementations of the same mathematics, to the last digits of float64."""
    pack = make_pack(normaliser=normaliser, depth=2, epochs=2, schedule="step", schedule_every=0.3, schedule_factor=0.5)
    dataset = make_dataset()
    fast = run(pack, dataset, dtype=torch.float64)
    monkeypatch.setattr(train, "is_fusible", lambda config: False)
    slow = PackRun(pack, dataset, dtype=torch.float64)
    assert isinstance(slow.blocks[0][1], GeneralTrainer)
    while not slow.finished:
        slow.step()
    for got, expected in zip(slow.results(), fast, strict=True):
        assert_curves_close(got, expected.curves, 1e-9)


@pytest.mark.parametrize("kind", ["fused", *GENERAL])
def test_dropping_dead_lanes_leaves_the_others_unchanged(kind):
    pack = make_pack(seeds=[0, 1, 2], epochs=4, depth=2, **GENERAL.get(kind, {"normaliser": "batch_norm"}))
    dataset = make_dataset()
    untouched = run(pack, dataset, dtype=torch.float64)
    pack_run = PackRun(pack, dataset, dtype=torch.float64)
    pack_run.step()
    ((block, trainer),) = pack_run.blocks
    state = trainer.state()
    for name in state:
        if name.endswith("bias"):
            state[name][[1, 4, 6, 7, 8]] = torch.nan  # the second setting of two seeds, all of the third
    trainer.load(state)
    pack_run.step()
    ((block, _),) = pack_run.blocks
    assert block.groups == ((0, 2), (3, 5))
    while not pack_run.finished:
        pack_run.step()
    for place, result in enumerate(pack_run.results()):
        if place in (1, 4, 6, 7, 8):
            assert (result.state, result.epochs_completed) == (TrialState.DIVERGED, 2)
        else:
            assert_curves_close(result, untouched[place].curves, 1e-10)


@pytest.mark.parametrize("kind", ["fused", "adam"])
def test_pruned_trials_end_with_what_they_have_and_the_others_go_on(kind):
    pack = make_pack(seeds=[0, 1, 2], epochs=4, **GENERAL.get(kind, {"normaliser": "batch_norm"}))
    dataset = make_dataset()
    untouched = run(pack, dataset, dtype=torch.float64)
    pack_run = PackRun(pack, dataset, dtype=torch.float64)
    pack_run.step()
    pack_run.prune([0, 3, 6, 7])
    assert sum(len(block.slots) for block, _ in pack_run.blocks) == 6  # of 9: the fifth survivor's row has a copy
    pack_run.step()
    resumed = PackRun(pack, dataset, dtype=torch.float64)
    resumed.restore(pack_run.checkpoint())
    while not resumed.finished:
        resumed.step()
    for place, result in enumerate(resumed.results()):
        if place in (0, 3, 6, 7):
            assert (result.state, result.reason) == (TrialState.PRUNED, Reason.STOPPED_EARLY)
            assert (result.epochs_completed, result.updates) == (1, 25)
            assert result.curves["test_loss"] == untouched[place].curves["test_loss"][:1]
        else:
            assert result.state == TrialState.SUCCEEDED
            assert_curves_close(result, untouched[place].curves, 1e-10)
    resumed.prune([1])  # after the end it is too late
    assert resumed.results()[1].state == TrialState.SUCCEEDED


def test_a_weight_decay_of_its_own_for_every_lane():
    pack = make_pack(seeds=[0], rates=[0.05], epochs=3)
    trials = tuple(replace(pack.trials[0], weight_decay=decay) for decay in (0.0, 0.1))
    without, with_decay = run(replace(pack, trials=trials), make_dataset(), dtype=torch.float64)
    (plain,) = run(pack, make_dataset(), dtype=torch.float64)
    assert_curves_close(without, plain.curves, 1e-10)
    weights = initial_parameters([13, 6, 5], 0)
    expected = plain_training(with_decay.config, make_dataset(), weights, torch.float64)
    assert_curves_close(with_decay, expected, 1e-9)
    assert with_decay.final("test_loss") != pytest.approx(without.final("test_loss"), abs=1e-3)


def test_learning_rates_scaled_with_batch_size():
    config = make_pack(seeds=[0], rates=[0.1], batch_size=8).config
    assert config.step_size == 0.1
    for scaling, factor in (("linear", 0.25), ("sqrt", 0.5)):
        scaled = replace(config, scaling=scaling, scaling_batch_size=32)
        assert scaled.step_size == pytest.approx(0.1 * factor)
        pack = make_pack(seeds=[0], rates=[0.1], batch_size=8, scaling=scaling, scaling_batch_size=32)
        (got,) = run(pack, make_dataset(), dtype=torch.float64)
        (expected,) = run(
            make_pack(seeds=[0], rates=[scaled.step_size], batch_size=8), make_dataset(), dtype=torch.float64
        )
        assert got.curves == expected.curves


def test_fewer_lanes_at_once_need_less_memory_beside_what_lanes_carry():
    pack, dataset = make_pack(seeds=list(range(8)), rates=[0.01, 0.02], width=32), make_dataset(features=64)

    def room(at_once: int) -> int:
        pack_run = PackRun(pack, dataset, lanes_at_once=at_once)
        pack_run.step()
        return sum(t.nbytes for one in pack_run._rooms.values() for t in vars(one).values())

    assert room(16) > 1.8 * room(8) > 1.8 * 1.8 * room(4)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", ["fused", *GENERAL])
def test_a_pack_resumes_from_a_checkpoint_to_the_last_bit(kind, at):
    changes = GENERAL.get(kind, {"normaliser": "batch_norm"})
    pack, dataset = make_pack(rates=[0.02, 0.05, 1e30], activation="relu", **changes), make_dataset()
    undisturbed = run(pack, dataset)
    first = PackRun(pack, dataset)
    for _ in range(at):
        first.step()
    second = PackRun(pack, dataset)
    second.restore(first.checkpoint())
    assert second.epoch == at
    while not second.finished:
        second.step()
    assert second.results() == undisturbed


def test_a_checkpoint_serves_another_number_of_lanes_at_once():
    pack, dataset = make_pack(seeds=[0, 1, 2]), make_dataset()
    first = PackRun(pack, dataset, dtype=torch.float64)
    first.step()
    second = PackRun(pack, dataset, dtype=torch.float64, lanes_at_once=4)
    second.restore(first.checkpoint())
    while not second.finished:
        second.step()
    for got, expected in zip(second.results(), run(pack, dataset, dtype=torch.float64), strict=True):
        assert_curves_close(got, expected.curves, 1e-10)


def test_a_checkpoint_that_is_damaged_or_of_another_pack_is_refused():
    pack_run = PackRun(make_pack(), make_dataset())
    content = pack_run.checkpoint()
    for damaged in (b"", content[:100], content[:-30], b"x" * 500):
        with pytest.raises(CheckpointError, match="damaged"):
            pack_run.restore(damaged)
    with pytest.raises(CheckpointError, match="of pack"):
        PackRun(replace(make_pack(), key="f" * 16), make_dataset()).restore(content)
    with pytest.raises(CheckpointError, match="does not fit"):
        PackRun(make_pack(depth=2), make_dataset()).restore(content)


def test_budgets_in_updates_and_samples():
    dataset = make_dataset()
    by_epochs = run(make_pack(seeds=[0], rates=[0.05], batch_size=4, epochs=2), dataset)[0]
    by_updates = run(make_pack(seeds=[0], rates=[0.05], batch_size=4, epochs=None, budget_updates=50), dataset)[0]
    assert by_updates.curves == by_epochs.curves
    assert (by_updates.updates, by_updates.samples, by_updates.epochs_completed) == (50, 200, 2)
    partly = run(make_pack(seeds=[0], rates=[0.05], batch_size=4, epochs=None, budget_samples=123), dataset)[0]
    assert (partly.updates, partly.samples, partly.epochs_completed) == (30, 120, 2)
    assert partly.curves["test_loss"][0] == by_epochs.curves["test_loss"][0]
    assert partly.curves["test_loss"][1] != by_epochs.curves["test_loss"][1]


def test_results_are_complete_and_in_the_packs_order():
    pack, dataset = make_pack(), make_dataset()
    results = run(pack, dataset)
    assert tuple(r.config for r in results) == pack.trials
    for result in results:
        assert (result.state, result.reason) == (TrialState.SUCCEEDED, None)
        assert (result.epochs_completed, result.updates, result.samples) == (3, 75, 300)  # 103 samples: 25 batches of 4
        assert result.chance_accuracy == 0.2
        assert set(result.curves) == set(METRICS)
        assert all(len(curve) == 3 and None not in curve for curve in result.curves.values())
    best = max(r.final("test_accuracy") or 0 for r in results)
    assert best > 0.4  # it learns: twice chance


def test_the_epoch_counts_up_to_the_budget_and_no_further():
    pack_run = PackRun(make_pack(epochs=2), make_dataset())
    assert (pack_run.epoch, pack_run.finished) == (0, False)
    pack_run.step()
    assert (pack_run.epoch, pack_run.finished) == (1, False)
    with pytest.raises(RuntimeError, match="epoch 1 of 2"):
        pack_run.results()
    pack_run.step()
    assert pack_run.finished
    with pytest.raises(RuntimeError, match="finished"):
        pack_run.step()


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_rerun_is_bit_identical(normaliser):
    pack, dataset = make_pack(normaliser=normaliser, depth=2), make_dataset()
    assert run(pack, dataset) == run(pack, dataset)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_a_ruined_lane_leaves_the_others_unchanged_to_the_last_bit(normaliser):
    pack, dataset = make_pack(normaliser=normaliser, depth=2, epochs=4), make_dataset()
    untouched = run(pack, dataset)
    pack_run = PackRun(pack, dataset)
    pack_run.step()
    ((_, trainer),) = pack_run.blocks
    assert isinstance(trainer, fused.FusedTrainer)
    with torch.inference_mode():
        trainer.model.weights[0][0, 6 * 1 + 2, 3] = torch.nan  # lane 1, unit 2; alone it makes no block smaller
    while not pack_run.finished:
        pack_run.step()
    results = pack_run.results()
    result = results[1]
    assert (result.state, result.reason) == (TrialState.DIVERGED, Reason.NON_FINITE_LOSS)
    assert result.epochs_completed == 2
    assert (result.updates, result.samples) == (50, 200)
    for metric in METRICS:
        assert result.curves[metric] == (untouched[1].curves[metric][0], None)
    assert result.chance_accuracy == 0.2
    for lane in (0, 2, 3, 4, 5):
        assert results[lane] == untouched[lane]


def test_a_learning_rate_that_diverges_is_recorded_beside_one_that_does_not():
    pack, dataset = make_pack(rates=[0.05, 1e8], activation="relu", depth=2, epochs=5), make_dataset()
    pack_run = PackRun(pack, dataset)
    while not pack_run.finished:
        pack_run.step()
    assert pack_run.epoch == 5
    for result in pack_run.results():
        assert (result.state == TrialState.DIVERGED) == (result.config.learning_rate == 1e8)
        assert len(result.curves["test_loss"]) == result.epochs_completed
        for curve in result.curves.values():
            assert all(value is None or math.isfinite(value) for value in curve)


def test_the_run_ends_early_when_every_lane_has_diverged():
    pack_run = PackRun(make_pack(rates=[1e8], activation="relu", depth=2, epochs=50), make_dataset())
    while not pack_run.finished:
        pack_run.step()
    assert pack_run.epoch < 50
    assert {r.state for r in pack_run.results()} == {TrialState.DIVERGED}


def test_order_depends_on_seed_and_epoch_alone(monkeypatch):
    """The samples each seed sees, read from the engine, whatever its place, normaliser and learning rates."""
    dataset = make_dataset()
    seen: list[np.ndarray] = []
    original = fused.FusedTrainer.train

    def spy(self, orders, first_update):
        seen.append(orders.numpy().copy())
        return original(self, orders, first_update)

    monkeypatch.setattr(fused.FusedTrainer, "train", spy)
    for seeds, normaliser, rates in (
        ([9], "none", [0.1]),
        ([3, 9], "affine_like", [0.1, 0.2]),
        ([9, 3], "none", [0.3]),
    ):
        seen.clear()
        pack_run = PackRun(make_pack(seeds=seeds, rates=rates, normaliser=normaliser), dataset)
        for epoch in range(2):
            seen.clear()
            pack_run.step()
            order = np.concatenate(seen, axis=1)[seeds.index(9)]
            np.testing.assert_array_equal(order, np.random.default_rng([9, epoch]).permutation(103)[:100])


def test_read_only_shared_arrays_are_used_in_place_and_without_a_warning():
    dataset = make_dataset()
    for split in (dataset.train, dataset.validation, dataset.test):
        for array in split:
            array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_run = PackRun(make_pack(), dataset)
    assert pack_run._train[0].data_ptr() == dataset.train.inputs.ctypes.data
    before = dataset.train.inputs.copy()
    pack_run.step()
    np.testing.assert_array_equal(dataset.train.inputs, before)


def test_packs_that_are_not_rectangular_or_too_large_are_refused():
    pack = make_pack()
    with pytest.raises(ValueError, match="every seed with every setting"):
        PackRun(replace(pack, trials=pack.trials[:-1]), make_dataset())
    with pytest.raises(ValueError, match="104 is larger than the 103"):
        PackRun(make_pack(batch_size=104), make_dataset())


def test_accuracy_is_withheld_where_the_loss_is_not_finite():
    dataset = make_dataset()
    ruined = dataset.test.inputs.copy()
    ruined[0] = np.inf
    dataset = replace(dataset, test=Split(ruined, dataset.test.labels))
    (result,) = run(make_pack(seeds=[0], rates=[0.1], epochs=1), dataset)
    assert result.state == TrialState.DIVERGED
    assert result.curves["test_accuracy"] == (None,)
    assert result.curves["validation_accuracy"][0] is not None
