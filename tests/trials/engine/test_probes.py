"""Probes against the paper's exact multiples, against brute force, and beside a training that must not notice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trials.engine.plain import make_dataset, make_pack
from trials.engine import PackRun, probes
from trials.engine.general import GeneralTrainer
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
    monkeypatch.setattr(probes, "_MOST_ROWS", 80)
    some = run_probe(config, state, lanes, train)
    for name in ("divergence_mean", "alignment", "update_gain", "interference", "input_directions"):
        torch.testing.assert_close(some[name], whole[name], rtol=0.35, atol=0.01)
        assert bool((some[name] != whole[name]).any())


def make_cnn_config(normaliser: str, batch_size: int, gain: bool = False, **changes) -> TrialConfig:
    some = {"channels": (3,), "kernel": 3, "stride": 1, "pooling": "none", **changes}
    config = make_config(model="cnn", normaliser=normaliser, batch_size=batch_size, gain=gain, **some)
    return replace(config, probe_samples=batch_size)


def cnn_state(config: TrialConfig, shape: tuple[int, int, int], lanes: int) -> dict[str, torch.Tensor]:
    network = make_network(config, shape, CLASSES)
    state = [network.initial(seed) | network.buffers() for seed in range(lanes)]
    return {name: torch.stack([one[name].double() for one in state]) for name in state[0]}


def images(count: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(3)
    return torch.from_numpy(generator.standard_normal((count, int(np.prod(shape))))), torch.arange(count) % CLASSES


def local_step(outputs, weight: torch.Tensor, bias: torch.Tensor, ideal: torch.Tensor) -> dict[str, float]:
    """Brute force: a step of each row's own gradient alone, and of all of them; outputs(W, b) is [rows, out]."""
    weight, bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    before = outputs(weight, bias)

    def moved(loss: torch.Tensor) -> torch.Tensor:
        into_weight, into_bias = torch.autograd.grad(loss, (weight, bias), retain_graph=True)
        return (outputs(weight - into_weight, bias - into_bias) - before).detach()

    change = moved((before * ideal).sum())
    own = torch.stack([moved((before[i] * ideal[i]).sum())[i] for i in range(len(ideal))])
    others = (change - own).square().sum()
    along = -(change * ideal).sum()
    return {
        "alignment": float(along / (change.norm() * ideal.norm())),
        "update_gain": float(along / ideal.square().sum()),
        "interference": float(others / (own.square().sum() + others)),
    }


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("normaliser", ["none", "rms_norm", "patch_norm", "patch_norm_affine"])
def test_patches_of_a_convolution_are_its_rows(normaliser: str, gain: bool):
    """A convolution and a head written out, each with its gain: what brute force says of both."""
    shape, batch_size = (2, 4, 4), 3
    config = make_cnn_config(normaliser, batch_size, gain)
    state = cnn_state(config, shape, 1)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in state if name.endswith(".gain")]:
        state[name] = torch.rand(state[name].shape, generator=generator, dtype=torch.float64) + 0.5
    inputs, labels = images(20, shape)
    (rows,) = probe_rows(config, len(inputs))
    x, y = inputs[rows].view(-1, *shape), labels[rows]
    conv_gain, head_gain = (state[f"{name}.gain"][0] if f"{name}.gain" in state else None for name in ("conv1", "head"))

    def patches(image: torch.Tensor) -> torch.Tensor:
        return F.unfold(image, 3, padding=1).mT.flatten(0, 1)

    def convolved(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if normaliser in ("none", "rms_norm"):
            image = x
            if normaliser == "rms_norm":
                image = F.rms_norm(x, shape, eps=1e-5) * (1 if conv_gain is None else conv_gain[:, None, None])
            return patches(image) @ weight.flatten(1).T + bias
        u, norm, scale = patches(x), patches(x).norm(dim=1, keepdim=True), 1 if conv_gain is None else conv_gain
        if normaliser == "patch_norm":
            return u / norm @ weight.flatten(1).T * scale + bias
        return (u @ weight.flatten(1).T + bias) / (norm.square() + 1).sqrt() * scale

    def head_of(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scale = 1 if head_gain is None else head_gain
        if normaliser == "patch_norm_affine":
            return (h @ weight.T + bias) / (h.square().sum(1, keepdim=True) + 1).sqrt() * scale
        if normaliser == "rms_norm":
            h = F.rms_norm(h, h.shape[1:], eps=1e-5)
        elif normaliser == "patch_norm":
            h = F.normalize(h, dim=1)
        return h * scale @ weight.T + bias

    conv, head = (
        [state[f"{name}.{part}"][0].requires_grad_() for part in ("weight", "bias")] for name in ("conv1", "head")
    )
    z = convolved(conv[0], conv[1])
    h = torch.tanh(z).view(batch_size, 16, 3).mT.flatten(1)
    logits = head_of(h, head[0], head[1])
    ideals = torch.autograd.grad(F.cross_entropy(logits, y), (z, logits))
    expected = [
        local_step(convolved, conv[0], conv[1], ideals[0]),
        local_step(lambda w, b: head_of(h.detach(), w, b), head[0], head[1], ideals[1]),
    ]
    network = make_network(config, shape, CLASSES)
    values = probe(network, config, make_lanes([0.1]), state, (inputs, labels), 0, 10)
    for index, one in enumerate(expected):
        for name, value in one.items():
            if (index, name) == (0, "interference"):
                assert bool(values[name][0, 0].isnan())  # patches of one image are not other samples
            else:
                assert values[name][0, index].item() == pytest.approx(value, rel=1e-8), (index, name)
    raw = patches(x).square().sum(1) + 1
    assert values["divergence_mean"][0, 0].item() == pytest.approx(float(raw.detach().mean()))


@pytest.mark.parametrize(
    ("normaliser", "placement", "gain"),
    [
        ("norm_like", "pre", True),
        ("norm_like_half", "pre", False),
        ("affine_like", "pre", True),
        ("rms_norm", "post", True),
    ],
)
def test_hidden_maps_equal_brute_force(normaliser: str, placement: str, gain: bool):
    config = make_config(normaliser=normaliser, placement=placement, gain=gain, depth=1, batch_size=6)
    config = replace(config, probe_samples=6)
    state = initial_state(config, 1)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in state if name.endswith(".gain")]:
        state[name] = torch.rand(state[name].shape, generator=generator, dtype=torch.float64) + 0.5
    inputs, labels = tensors()
    (rows,) = probe_rows(config, len(inputs))
    x = inputs[rows]

    def outputs(name: str, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scale = state.get(f"{name}.gain", torch.ones(1, 1))[0]
        if placement == "post":
            return h @ weight.T + bias
        if normaliser == "affine_like":
            return (h @ weight.T + bias) / (h.square().sum(1, keepdim=True) + 1).sqrt() * scale
        return F.normalize(h, dim=1) * scale @ weight.T + bias

    hidden, head = (
        [state[f"{name}.{part}"][0].requires_grad_() for part in ("weight", "bias")] for name in ("hidden1", "head")
    )
    z = outputs("hidden1", x, hidden[0], hidden[1])
    after = F.rms_norm(z, z.shape[1:], eps=1e-5) * state["hidden1.gain"][0] if placement == "post" else z
    h = torch.tanh(after)
    logits = outputs("head", h, head[0], head[1])
    ideals = torch.autograd.grad(F.cross_entropy(logits, labels[rows]), (z, logits))
    expected = [
        local_step(lambda w, b: outputs("hidden1", x, w, b), hidden[0], hidden[1], ideals[0]),
        local_step(lambda w, b: outputs("head", h.detach(), w, b), head[0], head[1], ideals[1]),
    ]
    values = run_probe(config, state, make_lanes([0.1]))
    half = 0.5 if normaliser == "norm_like_half" else 1.0
    for index, one in enumerate(expected):
        one["update_gain"] *= half
        for name, value in one.items():
            assert values[name][0, index].item() == pytest.approx(value, rel=1e-8), (index, name)


@pytest.mark.parametrize(("optimiser", "decay"), [("momentum", 0.01), ("adam", 0.01), ("adamw", 0.3)])
def test_the_step_is_the_one_the_trainer_takes_next(optimiser: str, decay: float):
    """In the middle of a training, with moments, schedule and decay: the linear model's logits move by just that."""
    momentum = 0.9 if optimiser == "momentum" else None
    config = make_config(
        depth=0, batch_size=8, optimiser=optimiser, momentum=momentum, weight_decay=decay, schedule="cosine"
    )
    train, updates = tensors(), 10
    lanes = make_lanes([0.01, 0.05], decay)
    trainer = GeneralTrainer(config, lanes, (1, 1, FEATURES), CLASSES, train, updates, "cpu", torch.float64)
    trainer.train(torch.arange(32)[None], 0)
    before = trainer.state()
    network = make_network(config, (1, 1, FEATURES), CLASSES)
    values = probe(network, config, lanes, before, train, 4, updates)
    # After the last update, where this schedule has come to nothing, the one before it counts.
    last = probe(network, config, lanes, before, train, updates, updates)
    assert bool(last["update_gain"].isfinite().all())
    (rows,) = probe_rows(config, 40)
    trainer.train(torch.from_numpy(rows)[None], 4)
    after = trainer.state()

    def logits(state) -> torch.Tensor:
        return train[0][rows] @ state["head.weight"].mT + state["head.bias"].unsqueeze(1)

    change, start = logits(after) - logits(before), logits(before).requires_grad_()
    losses = F.cross_entropy(start.flatten(0, 1), train[1][rows].repeat(2), reduction="sum") / 8
    (ideal,) = torch.autograd.grad(losses, start)
    along, size = -(change * ideal).sum((1, 2)), ideal.square().sum((1, 2))
    rates = lanes.step_sizes[0] * np.cos(np.pi / 2 * 4 / updates) ** 2
    torch.testing.assert_close(values["update_gain"][:, 0], along / (rates * size), rtol=1e-8, atol=0)
    torch.testing.assert_close(
        values["alignment"][:, 0], along / (size * change.square().sum((1, 2))).sqrt(), rtol=1e-8, atol=0
    )


def test_thinned_patches_are_not_of_a_few_columns(monkeypatch: pytest.MonkeyPatch):
    """Images of ones: a border patch is shorter, and every 8th position of a row of 16 is mostly border."""
    config, shape = make_cnn_config("none", 4), (3, 16, 16)
    monkeypatch.setattr(probes, "_MOST_ROWS", 128)
    train = torch.ones(4, 768, dtype=torch.float64), torch.arange(4)
    network, state = make_network(config, shape, CLASSES), cnn_state(config, shape, 1)
    values = probe(network, config, make_lanes([0.1]), state, train, 0, 1)
    every = F.unfold(train[0].view(-1, *shape), 3, padding=1).square().sum(1) + 1
    assert values["divergence_mean"][0, 0].item() == pytest.approx(float(every.mean()), rel=0.05)


@pytest.mark.parametrize("normaliser", ["batch_norm", "patch_norm"])
def test_slices_of_lanes_say_what_all_lanes_at_once_say(monkeypatch: pytest.MonkeyPatch, normaliser: str):
    config, shape = make_cnn_config(normaliser, 4), (2, 6, 6)
    network, state = make_network(config, shape, CLASSES), cnn_state(config, shape, 5)
    per_lane = probes._values_per_lane(network, 4)
    # What lanes share, the first map's input, is not of any; its outputs and all of the head are.
    outputs = 36 * 3
    assert per_lane == 4 * (outputs + 2 * outputs + CLASSES)
    whole = probe(network, config, make_lanes([0.1] * 5), state, images(20, shape), 0, 10)
    monkeypatch.setattr(probes, "_MOST_VALUES", 2 * per_lane)
    sliced = probe(network, config, make_lanes([0.1] * 5), state, images(20, shape), 0, 10)
    for name in PROBES:
        assert whole[name].shape == (5, 2)
        torch.testing.assert_close(sliced[name], whole[name], equal_nan=True)


def test_batches_without_a_gradient_are_left_out():
    """One hidden unit that is dead for half of the samples, batches of one."""
    config = replace(make_config(depth=1, width=1, activation="relu", batch_size=1), probe_samples=16)
    state, (inputs, labels) = initial_state(config, 2), tensors()
    z = inputs[probe_rows(config, len(inputs))[:, 0]] @ state["hidden1.weight"][0, 0]
    state["hidden1.bias"][0] = -z.median() - 1e-6
    state["hidden1.bias"][1] = -1e6
    values = run_probe(config, state, make_lanes([0.1, 0.1]), (inputs, labels))
    assert values["alignment"][0, 0].item() == pytest.approx(1)
    assert values["interference"][0, 0].item() == pytest.approx(0, abs=1e-20)
    live = inputs[probe_rows(config, len(inputs))[:, 0]][z > z.median()]
    assert values["update_gain"][0, 0].item() == pytest.approx(float((live.square().sum(1) + 1).mean()))
    assert bool(values["alignment"][1, 0].isnan())  # dead for every sample
    assert bool(values["divergence_mean"].isfinite().all())


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


def test_probes_are_taken_along_by_a_checkpoint():
    pack = make_pack(epochs=3)
    pack = replace(pack, trials=tuple(replace(t, probe_every=1, probe_samples=16) for t in pack.trials))
    dataset = make_dataset()
    first, second = PackRun(pack, dataset), PackRun(pack, dataset)
    first.step()
    second.restore(first.checkpoint())
    for one in (first, second):
        while not one.finished:
            one.step()
    assert first.results() == second.results()
    assert [probe.updates for probe in second.results()[0].probes] == [0, 25, 50, 75]


def test_what_is_not_finite_stays_in_its_lane():
    config = make_config(normaliser="batch_norm", depth=2)
    state, lanes = initial_state(config, 3), make_lanes([0.1, 0.2, 0.3])
    untouched = run_probe(config, state, lanes)
    state["hidden2.bias"][1] = torch.nan
    ruined = run_probe(config, state, lanes)
    assert all(bool(untouched[name].isfinite().all()) for name in PROBES)
    assert not bool(ruined["alignment"][1].isfinite().any())
    for name in PROBES:
        torch.testing.assert_close(ruined[name][[0, 2]], untouched[name][[0, 2]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_what_is_not_finite_stays_in_its_lane_of_convolutions(optimiser: str):
    config, shape = make_cnn_config("patch_norm", 4, optimiser=optimiser), (2, 6, 6)
    network, state = make_network(config, shape, CLASSES), cnn_state(config, shape, 3)
    if optimiser == "adam":
        moments = {f"{n}.{m}": torch.zeros_like(state[n]) for n in network.initial(0) for m in ("first", "second")}
        state |= moments | {"optimiser.steps": torch.zeros(3, dtype=torch.float64)}
    untouched = probe(network, config, make_lanes([0.1] * 3), state, images(20, shape), 0, 10)
    state["conv1.bias"][1] = torch.nan
    ruined = probe(network, config, make_lanes([0.1] * 3), state, images(20, shape), 0, 10)
    assert not bool(ruined["alignment"][1].isfinite().any())
    for name in PROBES:
        torch.testing.assert_close(ruined[name][[0, 2]], untouched[name][[0, 2]], rtol=0, atol=0, equal_nan=True)


def test_tokens_are_rows_of_an_attention_model():
    config = make_config(model="attention", depth=1, width=4, heads=2, patch=4, batch_size=3, normaliser="norm_like")
    shape = (1, 1, 12)
    network, state = make_network(config, shape, CLASSES), cnn_state(config, shape, 2)
    inputs, labels = images(20, shape)
    values = probe(network, config, make_lanes([0.1, 0.2]), state, (inputs, labels), 0, 10)
    tokens = inputs[probe_rows(config, 20).flatten()].view(-1, 4)
    assert values["alignment"].shape == (2, len(network.affine_maps))
    interference = values.pop("interference")
    assert bool(interference[:, -1].isfinite().all())  # the head sees a sample in one row, the others in several
    assert not bool(interference[:, :-1].isfinite().any())
    assert all(bool(value.isfinite().all()) for value in values.values())
    torch.testing.assert_close(
        values["divergence_mean"][:, 0], (tokens.square().sum(1) + 1).mean().expand(2), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(values["input_norm_mean"], torch.ones_like(values["alignment"]))


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


def test_a_probe_draws_nothing_and_changes_nothing():
    config = make_config(normaliser="batch_norm", depth=1)
    state = initial_state(config, 2)
    kept = {name: value.clone() for name, value in state.items()}
    drawn, numpy_drawn = torch.get_rng_state(), repr(np.random.get_state())
    run_probe(config, state, make_lanes([0.1, 0.2]))
    assert torch.equal(drawn, torch.get_rng_state())
    assert numpy_drawn == repr(np.random.get_state())
    assert all(torch.equal(value, kept[name]) and not value.requires_grad for name, value in state.items())


def test_probes_look_at_the_same_samples_whatever_the_trial():
    some = {"normaliser": "none", "batch_size": 4}
    rows = probe_rows(make_config(**some), 103)
    assert rows.shape == (2, 4)
    np.testing.assert_array_equal(rows, probe_rows(replace(make_config(**some), seed=7, learning_rate=3.0), 103))
    np.testing.assert_array_equal(rows.flatten(), probe_rows(make_config(batch_size=8), 103).flatten())
    assert probe_rows(make_config(batch_size=50), 103).shape == (1, 50)  # more than asked for: one batch it is
    assert probe_rows(replace(make_config(batch_size=1), probe_samples=1000), 103).shape == (16, 1)
