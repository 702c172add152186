"""The general trainer against a plain PyTorch loop, against the fast path, and one lane against another's ruin."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trials.engine.plain import PlainNetwork, make_dataset, make_pack
from trials.engine import general
from trials.engine.fused import FusedTrainer
from trials.engine.fused_mlp import initial_parameters
from trials.engine.general import GeneralTrainer
from trials.engine.graphs import Captured, set_numerics, without_effect
from trials.engine.lanes import Lanes
from trials.engine.optim import OPTIMISERS
from trials.records import TrialConfig

FEATURES, CLASSES, SAMPLES, BATCH = 12, 5, 60, 10
SHAPE = (3, 2, 2)
PERIOD = 5  # updates per call of `train`
UPDATES = 3 * PERIOD
SEEDS = (0, 7)
RATES = torch.tensor([[0.1, 0.02, 0.05], [0.02, 0.1, 0.03]], dtype=torch.float64)
DECAYS = torch.tensor([[0.0, 0.1, 0.02], [0.1, 0.0, 0.02]], dtype=torch.float64)
DATASET = make_dataset(train=SAMPLES, features=FEATURES, classes=CLASSES)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(optimiser: str = "sgd", **changes) -> TrialConfig:
    momentum = 0.8 if optimiser == "momentum" else None
    return make_pack(batch_size=BATCH, optimiser=optimiser, momentum=momentum, **changes).config


def data(split: str) -> tuple[Tensor, Tensor]:
    inputs, labels = getattr(DATASET, split)
    return torch.tensor(inputs, dtype=torch.float64), torch.tensor(labels)


def make_trainer(config: TrialConfig, lanes: Lanes | None = None, shape: tuple[int, int, int] = SHAPE):
    lanes = lanes or Lanes(SEEDS, RATES, DECAYS)
    return GeneralTrainer(config, lanes, shape, CLASSES, data("train"), UPDATES, "cpu", torch.float64)


def order(seed: int, period: int) -> np.ndarray:
    return np.random.default_rng([seed, period]).permutation(SAMPLES)[: PERIOD * BATCH]


def train(trainer, seeds: tuple[int, ...], period: int) -> Tensor:
    orders = torch.from_numpy(np.stack([order(seed, period) for seed in seeds]))
    return trainer.train(orders, period * PERIOD)


def plain_loop(config: TrialConfig, seed: int, lr: float, decay: float) -> tuple[list[list[float]], PlainNetwork]:
    """Per period: the sum of sample losses, and then loss and accuracy on the test split."""
    sizes = [FEATURES, *[config.width] * config.depth, CLASSES]
    parameters = [(weight.double(), bias.double()) for weight, bias in initial_parameters(sizes, seed)]
    network = PlainNetwork(parameters, config.normaliser, config.activation)
    weights = list(network.parameters())
    optimiser = {
        "sgd": lambda: torch.optim.SGD(weights, lr=lr, weight_decay=decay),
        "momentum": lambda: torch.optim.SGD(weights, lr=lr, weight_decay=decay, momentum=0.8),
        "adam": lambda: torch.optim.Adam(weights, lr=lr, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(weights, lr=lr, weight_decay=decay),
    }[config.optimiser]()
    schedule = {
        "constant": lambda: torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, UPDATES, eta_min=0.2 * lr),
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimiser, step_size=UPDATES // 5, gamma=0.5),
    }[config.schedule]()
    (inputs, labels), test = data("train"), data("test")
    curve = []
    for period in range(UPDATES // PERIOD):
        network.train()
        total = 0.0
        for rows in torch.from_numpy(order(seed, period)).split(BATCH):
            optimiser.zero_grad()
            loss = F.cross_entropy(network(inputs[rows]), labels[rows])
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * BATCH
        network.eval()
        with torch.no_grad():
            logits = network(test[0])
        accuracy = (logits.argmax(1) == test[1]).double().mean().item()
        curve.append([total, F.cross_entropy(logits, test[1]).item(), accuracy])
    return curve, network


CASES = [
    ("sgd", "none", {}),
    ("sgd", "affine_like", {"schedule": "cosine", "schedule_final": 0.2}),
    ("momentum", "batch_norm", {"schedule": "step", "schedule_every": 0.2, "schedule_factor": 0.5}),
    ("adam", "layer_norm", {"schedule": "cosine", "schedule_final": 0.2}),
    ("adam", "batch_norm", {"activation": "relu"}),
    ("adamw", "norm_like", {"schedule": "step", "schedule_every": 0.2, "schedule_factor": 0.5}),
    ("adamw", "none", {"depth": 2}),
    ("momentum", "none", {"depth": 0}),
    ("adam", "gradient_only", {"activation": "gelu"}),
]


@pytest.mark.parametrize(("optimiser", "normaliser", "changes"), CASES)
def test_every_lane_equals_plain_pytorch_over_a_whole_training(optimiser, normaliser, changes):
    """In float64, where only a wrong formula can make a difference."""
    config = make_config(optimiser, normaliser=normaliser, **changes)
    trainer = make_trainer(config)
    curves = []
    for period in range(UPDATES // PERIOD):
        losses = train(trainer, SEEDS, period)
        curves.append(torch.stack([losses, *trainer.evaluate(*data("test"))]))
    for lane in range(6):
        group, slot = divmod(lane, 3)
        expected, network = plain_loop(config, SEEDS[group], RATES[group, slot].item(), DECAYS[group, slot].item())
        got = torch.stack(curves)[:, :, lane]
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        squares = sum(parameter.square().sum() for parameter in network.parameters())
        torch.testing.assert_close(trainer.squared_norms()[lane], squares, rtol=1e-9, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize("normaliser", ["none", "batch_norm", "rms_norm", "norm_like", "norm_like_half", "affine_like"])
def test_the_fast_path_comes_to_the_same_state(normaliser):
    config = make_config(normaliser=normaliser, depth=2, schedule="cosine", schedule_final=0.2)
    lanes = Lanes(SEEDS, RATES, torch.zeros_like(DECAYS))
    trainers = (
        make_trainer(config, lanes),
        FusedTrainer(config, lanes, SHAPE, CLASSES, data("train"), UPDATES, "cpu", torch.float64, slots=3),
    )
    losses = [[train(trainer, SEEDS, period) for period in range(2)] for trainer in trainers]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*(trainer.state() for trainer in trainers), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*(trainer.evaluate(*data("test")) for trainer in trainers), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_half_steps_are_those_of_half_the_step_size(optimiser):
    states = []
    for normaliser, rates in (("norm_like_half", RATES), ("norm_like", RATES / 2)):
        trainer = make_trainer(make_config(optimiser, normaliser=normaliser), Lanes(SEEDS, rates, DECAYS))
        train(trainer, SEEDS, 0)
        states.append(trainer.state())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


def test_half_steps_are_of_affine_maps_alone():
    """An attention model's positions are added, not multiplied: they step in full."""
    changes = {"model": "attention", "width": 4, "heads": 2, "patch": 1}
    steps = []
    for normaliser in ("norm_like", "norm_like_half"):
        trainer = make_trainer(make_config(normaliser=normaliser, **changes), Lanes((0,), RATES[:1], 0 * DECAYS[:1]))
        before = trainer.state()
        trainer.train(torch.arange(BATCH)[None], 0)
        steps.append({name: value - before[name] for name, value in trainer.state().items()})
    for name, full in steps[0].items():
        expected = full if name == "position" else full / 2
        torch.testing.assert_close(steps[1][name], expected, rtol=1e-9, atol=1e-15)
        assert full.abs().max() > 1e-6 or ".key.bias" in name  # which attention does not feel


MOVES = [([0, 1, 2, 3, 4, 5], 0), ([5, 3, 4, 0, 2, 1], 1e-13), ([4, 1], 1e-13), ([3, 5, 1, 1], 1e-13), ([2], 1e-13)]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_lanes_go_on_elsewhere_from_their_state(optimiser):
    """At the same places to the last bit; elsewhere to rounding, as products may be summed in another order."""
    config = make_config(optimiser, normaliser="batch_norm", schedule="step", schedule_every=0.1, schedule_factor=0.7)
    trainer = make_trainer(config)
    train(trainer, SEEDS, 0)
    state = trainer.state()
    kept = {name: value.clone() for name, value in state.items()}
    expected_losses = train(trainer, SEEDS, 1)
    for name, value in kept.items():
        assert torch.equal(state[name], value)  # a copy: training on leaves it as it was
    for rows, tolerance in MOVES:
        lanes = torch.tensor(rows)
        groups = len({row // 3 for row in rows})
        seeds = tuple(dict.fromkeys(SEEDS[row // 3] for row in rows))
        rates, decays = (values.flatten()[lanes].view(groups, -1) for values in (RATES, DECAYS))
        other = make_trainer(config, Lanes(seeds, rates, decays))
        other.load({name: value[lanes] for name, value in kept.items()})
        for name, value in other.state().items():
            assert torch.equal(value, kept[name][lanes])
        losses = train(other, seeds, 1)
        torch.testing.assert_close(losses, expected_losses[lanes], rtol=tolerance, atol=tolerance)
        after = trainer.state()
        for name, value in other.state().items():
            torch.testing.assert_close(value, after[name][lanes], rtol=tolerance, atol=tolerance)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    trainer = make_trainer(make_config("adam"))
    train(trainer, SEEDS, 0)
    before = trainer.state()
    one_lane = {name: value[:1] for name, value in before.items()}
    with pytest.raises(RuntimeError, match=r"another network, optimiser or number of lanes.*\(1,.*here \(6,"):
        trainer.load(one_lane)
    with pytest.raises(RuntimeError, match="missing"):
        trainer.load(make_trainer(make_config("sgd")).state())
    for name, value in trainer.state().items():
        assert torch.equal(value, before[name])


MODELS = [
    ("mlp", {"normaliser": "batch_norm", "depth": 2}, SHAPE),
    ("mlp", {"normaliser": "gradient_only"}, SHAPE),
    ("residual_mlp", {"normaliser": "affine_like", "depth": 2}, SHAPE),
    ("attention", {"normaliser": "layer_norm", "width": 4, "heads": 2, "patch": 1, "gain": True}, SHAPE),
    (
        "cnn",
        {"normaliser": "patch_norm", "channels": (4,), "kernel": 3, "stride": 1, "pooling": "average"},
        SHAPE,
    ),
]


@pytest.mark.parametrize(("model", "changes", "shape"), MODELS, ids=[f"{m}-{c['normaliser']}" for m, c, _ in MODELS])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_a_ruined_lane_leaves_the_others_unchanged_to_the_last_bit(model, changes, shape, optimiser):
    config = make_config(optimiser, model=model, **changes)
    outcomes = []
    for ruined in (False, True):
        trainer = make_trainer(config, shape=shape)
        train(trainer, SEEDS, 0)
        if ruined:
            state = trainer.state()
            names = list(state)
            state[names[0]][1] = torch.nan
            state[names[1]][5] = torch.inf
            trainer.load(state)
        losses = train(trainer, SEEDS, 1)
        outcomes.append((losses, *trainer.evaluate(*data("test")), trainer.squared_norms(), trainer.state()))
    healthy = [0, 2, 3, 4]
    (*untouched, state), (*ruined, ruined_state) = outcomes
    for value, other in zip(untouched, ruined, strict=True):
        assert torch.equal(value[healthy], other[healthy])
    norms = ruined[-1]  # a saturated activation may hide an infinite weight from the loss, but not from these
    assert norms.isfinite().tolist() == [True, False, True, True, True, False]
    assert ruined[0][1].isnan()
    assert ruined[2][1].isnan()  # no accuracy where there is no loss
    for name, value in state.items():
        assert torch.equal(value[healthy], ruined_state[name][healthy])


@pytest.mark.parametrize(("model", "changes", "shape"), MODELS, ids=[f"{m}-{c['normaliser']}" for m, c, _ in MODELS])
def test_a_lane_equals_its_solo_run(model, changes, shape):
    config = make_config("adam", model=model, **changes)
    trainer = make_trainer(config, shape=shape)
    losses = [train(trainer, SEEDS, period) for period in range(2)]
    evaluated = trainer.evaluate(*data("validation"))
    assert all((after < before).all() for before, after in [losses])  # it learns
    for lane in (1, 3):
        group, slot = divmod(lane, 3)
        rates, decays = (values[group, slot].view(1, 1) for values in (RATES, DECAYS))
        alone = make_trainer(config, Lanes((SEEDS[group],), rates, decays), shape)
        for period in range(2):
            solo = train(alone, (SEEDS[group],), period)
            torch.testing.assert_close(solo, losses[period][lane : lane + 1], rtol=1e-9, atol=1e-9)
        for got, expected in zip(alone.evaluate(*data("validation")), evaluated, strict=True):
            torch.testing.assert_close(got, expected[lane : lane + 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("model", "changes", "shape"), MODELS, ids=[f"{m}-{c['normaliser']}" for m, c, _ in MODELS])
def test_evaluation_in_chunks_changes_nothing(monkeypatch, model, changes, shape):
    config = make_config(model=model, **changes)
    whole = make_trainer(config, shape=shape)
    assert train(whole, SEEDS, 0).isfinite().all()
    monkeypatch.setattr(general, "_SMALLEST_CHUNK", 1)
    monkeypatch.setattr(general, "_EVALUATION_VALUES", 0)
    chunked = make_trainer(config, shape=shape)
    chunked.load(whole.state())
    for got, expected in zip(chunked.evaluate(*data("test")), whole.evaluate(*data("test")), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_evaluation_is_bounded_by_the_largest_layer(monkeypatch):
    """25 units wide, where 12 features go in: 8 samples of the nominal 32 lanes are 32 · 25 · 8 values."""
    monkeypatch.setattr(general, "_SMALLEST_CHUNK", 1)
    monkeypatch.setattr(general, "_EVALUATION_VALUES", 32 * 25 * 8)
    trainer = make_trainer(make_config(width=25))
    seen = []
    forward = trainer._network.forward

    def spy(parameters, buffers, inputs, **options):
        seen.append(inputs.shape[1])
        return forward(parameters, buffers, inputs, **options)

    monkeypatch.setattr(trainer._network, "forward", spy)
    trainer.evaluate(*data("test"))
    assert sum(seen) == 37
    assert max(seen) == 8


def test_without_effect_puts_every_bit_back_after_the_runs():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, generator=generator, requires_grad=True)
    count = torch.zeros((), dtype=torch.int64)
    before, seen = weight.detach().clone(), []

    def step() -> None:
        with torch.no_grad():
            weight.mul_(1.7)
        count.add_(1)
        seen.append(count.item())

    without_effect(step, [weight, count], runs=3)
    assert seen == [1, 2, 3]
    assert torch.equal(weight, before)
    assert count.item() == 0


def test_captured_calls_once_per_call_on_the_cpu():
    total = torch.zeros(2)
    add = Captured(lambda: total.add_(1), [total])
    assert [add().tolist(), add().tolist()] == [[1, 1], [2, 2]]


def test_numerics_are_set_where_there_is_cuda_and_left_alone_on_the_cpu(monkeypatch):
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = [(cuda, "allow_tf32"), (cudnn, "allow_tf32"), (cudnn, "deterministic"), (cudnn, "benchmark")]
    before = [getattr(owner, name) for owner, name in flags]
    try:
        for (owner, name), value in zip(flags, (True, True, False, True), strict=True):
            setattr(owner, name, value)
        set_numerics("cpu")
        assert [getattr(owner, name) for owner, name in flags] == [True, True, False, True]
        set_numerics(torch.device("cuda", 1))
        assert [getattr(owner, name) for owner, name in flags] == [False, False, True, False]
    finally:
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the step as a CUDA graph")
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_captured_step_comes_to_the_same_state_as_on_the_cpu(optimiser):
    config = make_config(optimiser, normaliser="batch_norm", schedule="cosine", schedule_final=0.2)
    lanes = Lanes(SEEDS, RATES, DECAYS)
    on_gpu = tuple(value.cuda() for value in data("train"))
    gpu = GeneralTrainer(config, lanes, SHAPE, CLASSES, (on_gpu[0], on_gpu[1]), UPDATES, "cuda", torch.float64)
    cpu = make_trainer(config)
    for period in range(2):
        orders = torch.from_numpy(np.stack([order(seed, period) for seed in SEEDS]))
        losses = [
            trainer.train(orders.to(device), period * PERIOD) for trainer, device in ((gpu, "cuda"), (cpu, "cpu"))
        ]
        torch.testing.assert_close(losses[0].cpu(), losses[1], rtol=1e-9, atol=1e-9)
    after = cpu.state()
    for name, value in gpu.state().items():
        torch.testing.assert_close(value.cpu(), after[name], rtol=1e-9, atol=1e-9)


def test_training_splits_into_calls_anywhere():
    """The schedule goes by the count of updates given, the sums by call."""
    config = make_config("adam", schedule="cosine", schedule_final=0.0)
    whole, parts = make_trainer(config), make_trainer(config)
    total = train(whole, SEEDS, 0)
    orders = torch.from_numpy(np.stack([order(seed, 0) for seed in SEEDS]))
    sums = [parts.train(orders[:, : 2 * BATCH], 0), parts.train(orders[:, 2 * BATCH :], 2)]
    torch.testing.assert_close(sums[0] + sums[1], total, rtol=1e-14, atol=0)
    after = parts.state()
    for name, value in whole.state().items():
        assert torch.equal(value, after[name])


def test_configs_of_one_pack_share_a_trainer_whatever_their_own_rates():
    config = make_config("adamw")
    states = []
    for some in (config, replace(config, learning_rate=123.0, weight_decay=9.0, seed=99)):
        trainer = make_trainer(some)
        train(trainer, SEEDS, 0)
        states.append(trainer.state())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
