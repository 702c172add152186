"""Per-lane optimisers against torch.optim, and schedules against torch's and against fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.engine.plain import make_pack
from trials.engine.optim import OPTIMISERS, STEPS, Optimiser, Schedule
from trials.records import TrialConfig

STEP_SIZES = torch.tensor([[0.3, 0.1, 0.03], [0.01, 0.2, 1.0]], dtype=torch.float64)
DECAYS = torch.tensor([[0.0, 0.1, 0.0], [0.5, 0.01, 0.1]], dtype=torch.float64)
SHAPES = {"hidden.weight": (4, 3), "hidden.bias": (4,), "out.weight": (2, 4), "scale": ()}
SCHEDULES = {
    "constant": {},
    "cosine": {"schedule": "cosine", "schedule_final": 0.1},
    "step": {"schedule": "step", "schedule_every": 0.3, "schedule_factor": 0.5},
}
UPDATES = 10


def make_config(optimiser: str = "sgd", **changes) -> TrialConfig:
    momentum = 0.8 if optimiser == "momentum" else None
    return make_pack(optimiser=optimiser, momentum=momentum, **changes).config


def draw(seed: int, dtype: torch.dtype = torch.float64, lanes: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(lanes, *s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def torch_optimiser(kind: str, parameters: list[torch.Tensor], lr: float, decay: float) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=decay)
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=lr, weight_decay=decay, momentum=0.8 if kind == "momentum" else 0)


def torch_schedule(kind: str, optimiser: torch.optim.Optimizer, lr: float) -> torch.optim.lr_scheduler.LRScheduler:
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, UPDATES, eta_min=0.1 * lr)
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimiser, step_size=3, gamma=0.5)
    return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0)


@pytest.mark.parametrize("kind", OPTIMISERS)
@pytest.mark.parametrize(
    ("schedule", "rate_factor", "dtype"),
    [
        ("constant", 1.0, torch.float64),
        ("cosine", 1.0, torch.float64),
        ("step", 1.0, torch.float64),
        ("cosine", 0.5, torch.float64),
        ("constant", 1.0, torch.float32),
    ],
)
def test_every_lane_equals_torch_optim(kind, schedule, rate_factor, dtype):
    config = make_config(kind, **SCHEDULES[schedule])
    halves = {name: rate_factor for name in SHAPES if name != "scale"}
    optimiser = Optimiser(config, STEP_SIZES, DECAYS, halves, dtype=dtype)
    factors = Schedule(config)
    parameters = draw(0, dtype)
    lanes = []
    for lane, (lr, decay) in enumerate(zip(STEP_SIZES.flatten().tolist(), DECAYS.flatten().tolist(), strict=True)):
        own = {name: value[lane].clone() for name, value in parameters.items()}
        for some, rate in (([own[name] for name in halves], lr * rate_factor), ([own["scale"]], lr)):
            theirs = torch_optimiser(kind, some, rate, decay)
            lanes.append((lane, own, theirs, torch_schedule(schedule, theirs, rate)))
    state = optimiser.initial(parameters)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for update in range(UPDATES):
        gradients = draw(update + 1, dtype)
        kept = {name: value.clone() for name, value in gradients.items()}
        factor = torch.tensor(factors.factor(update, UPDATES), dtype=torch.float64)
        optimiser.step(parameters, gradients, state, factor)
        for name, value in kept.items():
            assert torch.equal(gradients[name], value)
        for lane, own, theirs, scheduler in lanes:
            for name, value in own.items():
                value.grad = gradients[name][lane]
            theirs.step()
            scheduler.step()
        for lane, own, *_ in lanes:
            for name, value in own.items():
                torch.testing.assert_close(parameters[name][lane], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_lane_gone_wrong_changes_no_bit_of_another(kind):
    results = []
    for ruined in (False, True):
        optimiser = Optimiser(make_config(kind), STEP_SIZES, DECAYS, dtype=torch.float64)
        parameters = draw(0)
        state = optimiser.initial(parameters)
        for update in range(3):
            gradients = draw(update + 1)
            if ruined and update == 1:
                gradients["hidden.weight"][2, 0, 0] = torch.nan
                gradients["hidden.bias"][2] = torch.inf
                parameters["scale"][4] = torch.inf
            optimiser.step(parameters, gradients, state)
        results.append({**parameters, **state})
    healthy = [0, 1, 3, 5]
    untouched, ruined = results
    for name, value in untouched.items():
        assert torch.equal(value[healthy], ruined[name][healthy])
    assert not ruined["hidden.weight"][2].isfinite().all()
    assert not ruined["scale"][4].isfinite()


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_state_is_one_row_per_lane_and_moves_with_it(kind):
    """Lanes that continue elsewhere, beside a lane that has just begun, go on to the last bit."""
    config = make_config(kind)
    whole = Optimiser(config, STEP_SIZES, DECAYS, dtype=torch.float64)
    parameters = draw(0)
    state = whole.initial(parameters)
    for update in range(3):
        whole.step(parameters, draw(update + 1), state)
    assert all(len(value) == 6 for value in state.values())
    assert (STEPS in state) == (kind in ("adam", "adamw"))
    rows = torch.tensor([5, 1])
    fresh = draw(9, lanes=1)
    some_parameters = {name: torch.cat([value[rows], fresh[name]]) for name, value in parameters.items()}
    begun = whole.initial(fresh)
    some_state = {name: torch.cat([value[rows], begun[name][:1]]) for name, value in state.items()}
    step_sizes, decays = (torch.cat([v.flatten()[rows], torch.tensor([0.2])]) for v in (STEP_SIZES, DECAYS))
    part = Optimiser(config, step_sizes, decays, dtype=torch.float64)
    alone = Optimiser(config, torch.tensor([0.2]), torch.tensor([0.2]), dtype=torch.float64)
    alone_state = {name: value[:1].clone() for name, value in begun.items()}
    for update in range(3, 6):
        gradients, others = draw(update + 1), draw(update + 100, lanes=1)
        whole.step(parameters, gradients, state)
        part.step(
            some_parameters, {name: torch.cat([v[rows], others[name]]) for name, v in gradients.items()}, some_state
        )
        alone.step(fresh, others, alone_state)
    for name, value in some_parameters.items():
        assert torch.equal(value[:2], parameters[name][rows])
        torch.testing.assert_close(value[2:], fresh[name], rtol=1e-14, atol=1e-14)


@given(st.integers(1, 60), st.integers(2, 40), st.integers(1, 39), st.floats(0.05, 1))
def test_step_schedule_steps_exactly_at_the_shares(updates, parts, share, factor):
    """`every` arrives as a float; what counts is the fraction it stands for."""
    every = Fraction(min(share, parts - 1), parts)
    schedule = Schedule(make_config(schedule="step", schedule_every=float(every), schedule_factor=factor))
    for update in range(updates):
        assert schedule.factor(update, updates) == factor ** (Fraction(update, updates) // every)


def test_step_schedule_with_shares_that_no_float_is():
    schedule = Schedule(make_config(schedule="step", schedule_every=0.1, schedule_factor=0.5))
    assert [schedule.factor(update, 10) for update in range(10)] == [0.5**n for n in range(10)]
    for steps in range(1, 10):
        assert schedule.factor(steps * 100 - 1, 1000) == 0.5 ** (steps - 1)
        assert schedule.factor(steps * 100, 1000) == 0.5**steps
    tiny = Schedule(make_config(schedule="step", schedule_every=1e-9, schedule_factor=0.1))
    assert tiny.factor(1, 10**10) == 1
    assert tiny.factor(1, 10) == 0  # 0.1 to the power of 10⁸


@given(st.integers(1, 10**9), st.floats(0, 1), st.data())
def test_cosine_schedule_falls_from_one_to_its_final_share(updates, final, data):
    schedule = Schedule(make_config(schedule="cosine", schedule_final=final))
    assert schedule.factor(0, updates) == pytest.approx(1)
    assert schedule.factor(updates, updates) == pytest.approx(final)
    update = data.draw(st.integers(0, updates - 1))
    now, then = schedule.factor(update, updates), schedule.factor(update + 1, updates)
    assert final <= then + 1e-15 <= now + 2e-15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimiser": "lion"}, "unknown optimiser 'lion'; known: sgd, momentum, adam, adamw"),
        ({"optimiser": "momentum"}, "needs a momentum"),
    ],
)
def test_what_is_no_optimiser_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Optimiser(make_pack(**changes).config, STEP_SIZES, DECAYS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "triangle"}, "unknown schedule 'triangle'; known: constant, cosine, step"),
        ({"schedule": "step", "schedule_every": 0.3}, "needs schedule_every and schedule_factor"),
        ({"schedule": "step", "schedule_factor": 0.3}, "needs schedule_every and schedule_factor"),
    ],
)
def test_what_is_no_schedule_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(make_config(**changes))
