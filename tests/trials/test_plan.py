"""The plan: pure, complete, and the same for the same spec."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.studies import document, plan, spec
from trials.plan import MAX_LANES, count_trials, lane_bytes, make_plan
from trials.spec import SpecError, facts_for, parse_spec

axes = st.fixed_dictionaries(
    {
        "space.normaliser": st.lists(st.sampled_from(["none", "batch_norm", "norm_like"]), min_size=1, unique=True),
        "space.batch_size": st.lists(st.integers(1, 1000), min_size=2, max_size=3, unique=True),
        "space.learning_rate": st.lists(
            st.integers(1, 200).map(lambda n: n / 1000), min_size=1, max_size=70, unique=True
        ),
        "space.weight_decay": st.none() | st.lists(st.sampled_from([0.0, 1e-4, 0.1]), min_size=1, unique=True),
        "space.gain": st.sampled_from([None, [True], [False, True]]),
        "space.optimiser": st.sampled_from([None, ["adam"], ["sgd", "momentum"]]),
        "seeds": st.integers(1, 20) | st.lists(st.integers(0, 100), min_size=1, max_size=10, unique=True),
        "hypotheses": st.just([]),
    }
)


@settings(deadline=None, max_examples=60)  # a case may have thousands of trials
@given(axes)
def test_every_cell_and_seed_is_planned_once_in_rectangular_packs(changes):
    study, laid = spec(**changes), plan(**changes)
    trials = [trial for pack in laid.packs for trial in pack.trials]
    space = study.space
    decays, gains, optimisers = space.weight_decay or [0.0], space.gain or [False], space.optimiser or ["sgd"]
    wanted = set(
        itertools.product(
            space.normaliser, space.batch_size, gains, optimisers, decays, space.learning_rate, study.seed_list
        )
    )
    assert len(trials) == laid.trials == count_trials(study) == len(wanted)
    assert wanted == {
        (t.normaliser, t.batch_size, t.gain, t.optimiser, t.weight_decay, t.learning_rate, t.seed) for t in trials
    }
    assert {t.momentum for t in trials} <= {None, 0.9}
    assert all((t.momentum is not None) == (t.optimiser == "momentum") for t in trials)
    assert len({t.key for t in trials}) == len(trials)
    assert len({t.cell_key for t in trials}) == laid.cells == len(trials) // len(study.seed_list)
    assert len({pack.key for pack in laid.packs}) == len({pack.label for pack in laid.packs}) == len(laid.packs)
    for pack in laid.packs:
        assert len(pack.trials) <= MAX_LANES
        assert [(t.seed, (t.weight_decay, t.learning_rate)) for t in pack.trials] == [
            (seed, setting) for seed in pack.seeds for setting in pack.settings
        ]
        alike = {replace(t, seed=0, learning_rate=1.0, weight_decay=0.0) for t in pack.trials}
        assert len(alike) == 1


def test_same_spec_same_plan_and_resources_change_nothing():
    assert plan() == plan()
    assert plan().packs == plan(resources={"cpus_per_pack": 4}, name="other").packs


def test_keys_are_pinned():
    """Shards are found by these keys: a change here orphans every ledger in the field."""
    first = plan().packs[0]
    assert (first.label, first.key) == ("none-B64", "dddae67af7c19ba0")
    assert (first.trials[0].key, first.trials[0].cell_key) == ("53de6cde86719552", "537c67c3a1dc2666")


def test_labels_name_the_axes_that_vary():
    labels = [p.label for p in plan(**{"space.activation": ["tanh", "relu"], "space.depth": [0, 1]}).packs]
    assert labels[0] == "none-B64-D0-tanh"
    varied = {
        "model": {"kind": "cnn", "placement": "post"},
        "hypotheses": [],
        "space.normaliser": ["rms_norm"],
        "space.channels": [[4, 8]],
        "space.kernel": [5],
        "space.stride": [2],
        "space.pooling": ["average"],
        "space.gain": [True],
        "space.optimiser": ["adamw"],
        "space.weight_decay": [0.0, 0.1],
        "data.dataset": "cifar10",
    }
    (first, *_) = plan(**varied).packs
    assert first.label == "rms_norm-B64-gain-C4-8-K5-S2-pool_average-adamw"
    assert (first.config.depth, first.config.width) == (2, 8)
    many = plan(seeds=100).packs[0]
    assert many.label == "none-B64-1of4"


def test_batch_larger_than_the_training_split_is_refused_with_its_place():
    study = parse_spec(document(**{"space.batch_size": [64, 1223]}))
    facts = facts_for(study.data, [])
    assert facts.train == 1222  # 1797 digits − 20 % test − 15 % validation
    with pytest.raises(SpecError) as caught:
        make_plan(study, facts)
    assert [i.pointer for i in caught.value.issues] == ["/space/batch_size/1"]
    assert "1222" in caught.value.issues[0].detail
    make_plan(parse_spec(document(**{"space.batch_size": [64, 1222]})), facts)


def test_more_training_samples_than_there_are_is_refused():
    study = spec(**{"data.train_samples": 5000})
    with pytest.raises(SpecError, match="1438"):
        make_plan(study, facts_for(study.data, []))


def test_cost_counts_what_is_trained():
    cost = plan(**{"space.batch_size": [611, 1222]}).cost
    lanes = 2 * 2 * 2  # normalisers × learning rates × seeds
    assert cost.updates == lanes * 2 * (2 + 1)  # two epochs of 2 and of 1 batches
    assert cost.samples == lanes * 2 * 1222 * 2
    assert cost.core_seconds > 0


def test_large_networks_share_a_pack_with_fewer():
    wide = plan(**{"model": {"width": 8192, "depth": 2}, "space.learning_rate": [0.1, 0.2, 0.3, 0.4], "seeds": 4})
    assert {len(pack.trials) for pack in wide.packs} == {2}
    assert wide.trials == 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("model", "axis", "pointer"),
    [({"width": 65536, "depth": 3}, None, "/model/width"), ({"depth": 3}, [8, 65536], "/space/width/1")],
)
def test_network_that_no_node_holds_is_refused(model, axis, pointer):
    changes = {"model": model} | ({"space.width": axis} if axis else {})
    study = spec(**changes)
    with pytest.raises(SpecError, match="GiB of memory") as caught:
        make_plan(study, facts_for(study.data, []))
    assert [i.pointer for i in caught.value.issues] == [pointer]


def test_optimiser_state_takes_its_share_of_memory():
    model = {"width": 8192, "depth": 1}
    facts = facts_for(spec().data, [])
    needed = {
        name: lane_bytes(plan(**{"model": model, "training.optimiser": name}).packs[0].config, facts)
        for name in ("sgd", "momentum", "adam", "adamw")
    }
    weights = 8192 * (64 + 10)
    assert needed["momentum"] - needed["sgd"] == 4 * weights
    assert needed["adam"] == needed["adamw"] == needed["sgd"] + 8 * weights


CNN = {"kind": "cnn", "channels": [4, 4, 4, 4]}
CNN_ARMS = {"space.normaliser": ["none", "patch_norm"], "hypotheses": []}


@pytest.mark.parametrize(
    ("changes", "pointer", "words"),
    [
        ({"model": CNN, **CNN_ARMS}, "/model/channels", "8 × 8 are too small: pooling leaves nothing after layer 4"),
        (
            {"model": {"kind": "cnn"}, "space.channels": [[4, 4], [4] * 4], **CNN_ARMS},
            "/space/channels/1",
            "too small",
        ),
        (
            {"model": {"kind": "cnn", "channels": [4]}, "data": {"dataset": "synthetic"}, **CNN_ARMS},
            "/model/channels",
            "32 values are too small",
        ),
        ({"model": {"kind": "attention", "patch": 3}}, "/model/patch", "do not divide samples of 8 × 8"),
        (
            {"model": {"kind": "attention", "patch": 5}, "data": {"dataset": "synthetic"}},
            "/model/patch",
            "do not divide samples of 32 values",
        ),
        ({"training": {"budget": {"samples": 127}}}, "/training/budget", "less than one batch of 128"),
        (
            {"model": {"kind": "cnn", "channels": [4096] * 32, "kernel": 31, "pooling": "none"}, **CNN_ARMS},
            "/model/channels",
            "4096-4096 needs about",
        ),
        (
            {"model": {"kind": "attention", "patch": 1}, "space.width": [8, 65536], "hypotheses": []},
            "/space/width/1",
            "GiB of memory",
        ),
    ],
)
def test_design_that_the_data_does_not_fit_is_refused_with_its_place(changes, pointer, words):
    study = spec(**changes)
    with pytest.raises(SpecError) as caught:
        make_plan(study, facts_for(study.data, []))
    assert [issue.pointer for issue in caught.value.issues] == [pointer]
    assert words in caught.value.issues[0].detail


@pytest.mark.parametrize(
    ("budget", "updates"), [({"updates": 7}, 7), ({"samples": 128}, 1), ({"samples": 1000}, 7), ({"epochs": 2}, 18)]
)
def test_cost_follows_the_budget(budget, updates):
    changes = {"training": {"budget": budget}, "space.batch_size": [128], "hypotheses": []}
    cost = plan(**changes).cost
    lanes = 2 * 2 * 2
    assert (cost.updates, cost.samples) == (lanes * updates, lanes * updates * 128)
    extra = plan(**changes, model={"width": 4, "gain": True}).cost
    assert extra.core_seconds >= cost.core_seconds
