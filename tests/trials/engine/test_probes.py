"""Probes against the paper's exact multiples, against brute force, and beside a training that must not notice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trials.engine.plain import make_dataset, make_pack
from trials.engine import PackRun, probes
from trials.engine.lanes import Lanes
from trials.engine.networks import make_network
from trials.engine.probes import probe, probe_rows
from trials.records import PROBES, TrialConfig

DENSE = (
    "none",
    "batch_norm",
    "layer_norm",
    "rms_norm",
    "norm_like",
    "norm_like_half",
    "affine_like",
    "gradient_only",
)
FEATURES, CLASSES = 13, 5


def make_config(**changes) -> TrialConfig:
    return make_pack(seeds=[0], rates=[0.1], probe_every=1, probe_samples=8, **changes).config


def initial_state(config: TrialConfig, lanes: int) -> dict[str, torch.Tensor]:
    network = make_network(config, (1, 1, FEATURES), CLASSES)
    by_seed = [network.initial(seed) | network.buffers() for seed in range(lanes)]
    return {name: torch.stack([values[name].double() for values in by_seed]) for name in by_seed[0]}


def make_lanes(step_sizes: list[float], decay: float = 0.0) -> Lanes:
    sizes = torch.tensor([step_sizes], dtype=torch.float64)
    return Lanes((0,), sizes, torch.full_like(sizes, decay))


def tensors(count: int = 40, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    split = make_dataset(train=count, seed=seed).train
    return torch.tensor(split.inputs, dtype=torch.float64), torch.tensor(split.labels)


def run_probe(config: TrialConfig, state, lanes: Lanes, train=None, update: int = 0):
    network = make_network(config, (1, 1, FEATURES), CLASSES)
    return probe(network, config, lanes, state, train or tensors(), update, 100)


@pytest.mark.parametrize("normaliser", [n for n in DENSE if n != "batch_norm"])  # it makes nothing of one sample
def test_a_single_sample_moves_by_the_papers_multiple(normaliser: str):
    config = replace(make_config(normaliser=normaliser, depth=2, batch_size=1), probe_samples=1)
    values = run_probe(config, initial_state(config, 3), make_lanes([0.1, 0.2, 0.3]))
    assert values["alignment"].numpy() == pytest.approx(1)
    assert values["interference"].numpy() == pytest.approx(0, abs=1e-20)
    expected = {"norm_like": 2.0, "norm_like_half": 1.0, "affine_like": 1.0, "gradient_only": 1.0}
    if normaliser == "none":
        np.testing.assert_allclose(values["update_gain"], values["divergence_mean"])
    elif normaliser in expected:
        np.testing.assert_allclose(values["update_gain"], expected[normaliser])
    else:
        np.testing.assert_allclose(values["update_gain"], values["input_norm_mean"] ** 2 + 1)
    inputs, _ = tensors()
    row = probe_rows(config, len(inputs))[0, 0]
    np.testing.assert_allclose(values["divergence_mean"][:, 0], float(inputs[row].square().sum() + 1))


@pytest.mark.parametrize(
    ("optimiser", "decay"), [("sgd", 0.0), ("sgd", 0.01), ("momentum", 0.01), ("adam", 0.01), ("adamw", 0.01)]
)
@pytest.mark.parametrize("normaliser", ["none", "affine_like", "layer_norm", "gradient_only"])
def test_values_equal_brute_force_per_sample(normaliser: str, optimiser: str, decay: float):
    """One linear map, every sample's own gradient by itself, and torch.optim for the step."""
    momentum = 0.9 if optimiser == "momentum" else None
    config = make_config(
        normaliser=normaliser, depth=0, batch_size=8, optimiser=optimiser, momentum=momentum, weight_decay=decay
    )
    state = initial_state(config, 1)
    inputs, labels = tensors()
    (rows,) = probe_rows(config, len(inputs))
    x, y = inputs[rows], labels[rows]
    weight, bias = (torch.nn.Parameter(state[f"head.{part}"][0].clone()) for part in ("weight", "bias"))

    def outputs() -> torch.Tensor:
        u = F.layer_norm(x, x.shape[1:], eps=1e-5) if normaliser == "layer_norm" else x
        z = u @ weight.T + bias
        return z / (x.square().sum(1, keepdim=True) + 1).sqrt() if normaliser == "affine_like" else z

    before = outputs()
    ideal = torch.autograd.grad(F.cross_entropy(before, y), before, retain_graph=True)[0]
    own_changes, weight_sum, bias_sum = [], torch.zeros_like(weight), torch.zeros_like(bias)
    with torch.no_grad():
        divergence = x.square().sum(1) + 1
        scale = 1 / divergence if normaliser == "gradient_only" else torch.ones(8)
    for i in range(8):
        loss = F.cross_entropy(outputs()[i : i + 1], y[i : i + 1]) / 8
        weight_gradient, bias_gradient = (g * scale[i] for g in torch.autograd.grad(loss, (weight, bias)))
        weight_sum, bias_sum = weight_sum + weight_gradient, bias_sum + bias_gradient
        saved = weight.detach().clone(), bias.detach().clone()
        with torch.no_grad():
            weight -= weight_gradient
            bias -= bias_gradient
            own_changes.append((outputs() - before)[i])
            weight.copy_(saved[0])
            bias.copy_(saved[1])
    with torch.no_grad():
        own = torch.stack(own_changes)
        weight -= weight_sum
        bias -= bias_sum
        others = outputs() - before - own
        weight += weight_sum
        bias += bias_sum
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds.get(optimiser, torch.optim.SGD)
    options = {"momentum": momentum} if momentum else {}
    torch_optimiser = kind([weight, bias], lr=0.1, weight_decay=decay, **options)
    weight.grad, bias.grad = weight_sum, bias_sum
    before = before.detach()
    torch_optimiser.step()
    with torch.no_grad():
        change = outputs() - before

    lanes = make_lanes([0.1], decay=decay)
    for name in ("velocity", "first", "second"):  # an optimiser that has not stepped yet
        for part in ("weight", "bias"):
            state[f"head.{part}.{name}"] = torch.zeros_like(state[f"head.{part}"])
    state["optimiser.steps"] = torch.zeros(1, dtype=torch.float64)
    values = run_probe(config, state, lanes)
    expected = {
        "alignment": -(change * ideal).sum() / (change.norm() * ideal.norm()),
        "update_gain": -(change * ideal).sum() / (0.1 * ideal.square().sum()),
        "interference": others.square().sum() / (own.square().sum() + others.square().sum()),
        "divergence_mean": divergence.mean(),
        "divergence_sd": divergence.std(correction=0),
    }
    for name, value in expected.items():
        assert values[name].item() == pytest.approx(float(value), rel=1e-9), name


def test_many_rows_are_thinned_and_say_nearly_the_same(monkeypatch: pytest.MonkeyPatch):
    config = replace(make_config(batch_size=100, depth=2), probe_samples=100)
    state, lanes, train = initial_state(config, 2), make_lanes([0.1, 0.2]), tensors(100)
    whole = run_probe(config, state, lanes, train)
    monkeypatch.setattr(probes, "_MOST_ROWS", 50)
    half = run_probe(config, state, lanes, train)
    for name in ("divergence_mean", "alignment", "update_gain", "interference", "input_directions"):
        torch.testing.assert_close(half[name], whole[name], rtol=0.2, atol=0.01)
        assert bool((half[name] != whole[name]).any())


def test_interference_is_none_where_inputs_are_orthogonal_and_grows_where_they_are_alike():
    found = {}
    for kind in ("orthogonal", "alike"):
        # With the constant 1 of the bias, inputs are orthogonal where x_i·x_j = −1.
        gram = torch.eye(FEATURES, dtype=torch.float64) * 40 - 1 if kind == "orthogonal" else None
        inputs = torch.linalg.cholesky(gram) if gram is not None else torch.ones(16, FEATURES, dtype=torch.float64)
        labels = torch.arange(len(inputs)) % CLASSES
        for batch_size in (2, 4, 8):
            config = replace(make_config(depth=0, batch_size=batch_size), probe_samples=8)
            state = initial_state(config, 1)
            found[kind, batch_size] = run_probe(config, state, make_lanes([0.1]), (inputs, labels))[
                "interference"
            ].item()
    assert found["orthogonal", 2] == pytest.approx(0, abs=1e-20)
    assert found["orthogonal", 8] == pytest.approx(0, abs=1e-20)
    assert 0.05 < found["alike", 2] < found["alike", 8] < 1


def test_shapes_of_a_cloud_in_the_plane():
    """Figure 1: what each normaliser makes of N(0, I₂)."""
    inputs = torch.from_numpy(np.random.default_rng(0).standard_normal((512, 2)))
    labels = torch.zeros(512, dtype=torch.int64)
    for normaliser, radius, directions in (("layer_norm", 2**0.5, 1), ("norm_like", 1, 2), ("rms_norm", 2**0.5, 2)):
        config = replace(make_config(depth=0, batch_size=512, normaliser=normaliser), probe_samples=512)
        network = make_network(config, (1, 1, 2), 2)
        state = {name: value.double()[None] for name, value in network.initial(0).items()}
        values = probe(network, config, make_lanes([0.1]), state, (inputs, labels), 0, 1)
        assert values["input_norm_mean"].item() == pytest.approx(radius, rel=0.02), normaliser
        assert values["input_norm_sd"].item() < 0.1
        assert values["input_directions"].item() == pytest.approx(directions, rel=0.05)


def test_what_is_not_finite_stays_in_its_lane():
    config = make_config(normaliser="batch_norm", depth=2)
    state, lanes = initial_state(config, 3), make_lanes([0.1, 0.2, 0.3])
    untouched = run_probe(config, state, lanes)
    state["hidden2.bias"][1] = torch.nan
    ruined = run_probe(config, state, lanes)
    assert all(bool(untouched[name].isfinite().all()) for name in PROBES)
    assert not bool(ruined["alignment"][1].isfinite().any())
    for name in PROBES:
        torch.testing.assert_close(ruined[name][[0, 2]], untouched[name][[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{"normaliser": "batch_norm"}, {"optimiser": "adam", "normaliser": "layer_norm"}])
def test_training_does_not_notice(changes):
    dataset = make_dataset()
    outcomes = {}
    for every in (None, 2):
        pack = make_pack(rates=[0.02, 1e30], activation="relu", epochs=4, **changes)
        pack = replace(
            pack, trials=tuple(replace(t, probe_every=every, probe_samples=every and 32) for t in pack.trials)
        )
        pack_run = PackRun(pack, dataset)
        while not pack_run.finished:
            pack_run.step()
        outcomes[every] = pack_run.results()
    for plain, probed in zip(outcomes[None], outcomes[2], strict=True):
        assert plain.curves == probed.curves
        assert plain.probes == ()
        updates = [p.updates for p in probed.probes]
        assert updates == ([0, 50, 100] if plain.state == "succeeded" else [0])
        assert all(set(p.values) == set(PROBES) and len(p.values["alignment"]) == 2 for p in probed.probes)


def test_probes_look_at_the_same_samples_whatever_the_trial():
    some = {"normaliser": "none", "batch_size": 4}
    rows = probe_rows(make_config(**some), 103)
    assert rows.shape == (2, 4)
    np.testing.assert_array_equal(rows, probe_rows(replace(make_config(**some), seed=7, learning_rate=3.0), 103))
    np.testing.assert_array_equal(rows.flatten(), probe_rows(make_config(batch_size=8), 103).flatten())
    assert probe_rows(make_config(batch_size=50), 103).shape == (1, 50)  # more than asked for: one batch it is
    assert probe_rows(replace(make_config(batch_size=1), probe_samples=1000), 103).shape == (16, 1)
