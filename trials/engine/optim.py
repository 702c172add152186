"""Optimisers with a step size and a weight decay of their own for every lane, and schedules.

The formulas are those of `torch.optim`: per lane the numbers are those of SGD, SGD with momentum,
Adam and AdamW there. Everything happens in place, in a few kernels per parameter for all lanes at once,
and element by element, so that a lane's NaN stays its own.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from trials.records import TrialConfig

OPTIMISERS = ("sgd", "momentum", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")
BETAS = (0.9, 0.999)
EPS = 1e-8
STEPS = "optimiser.steps"  # in the state of adam and adamw: updates each lane has taken

_LARGEST_DENOMINATOR = 10**7


class Schedule:
    """What the step size is multiplied by at each update, in closed form: resuming needs no state.

    Raises:
        ValueError: where the schedule is unknown or lacks a value.
    """

    def __init__(self, config: TrialConfig):
        self._kind = config.schedule
        self._final = config.schedule_final or 0.0
        self._factor = config.schedule_factor or 1.0
        if self._kind not in SCHEDULES:
            raise ValueError(f"unknown schedule {self._kind!r}; known: {', '.join(SCHEDULES)}")
        if self._kind == "step" and not (config.schedule_every and config.schedule_factor):
            raise ValueError("a step schedule needs schedule_every and schedule_factor, both above 0")
        self._every = _simplest(config.schedule_every or 1.0)

    def factor(self, update: int, updates: int) -> float:
        """The factor of the update that comes after `update` others, of `updates` in all.

        With t = update / updates: 1 for `constant`; final + (1 − final)·(1 + cos πt)/2 for `cosine`;
        factor^⌊t / every⌋ for `step`, in integers, so that `every: 0.1` of 10 updates steps at each of them.
        """
        if self._kind == "cosine":
            return self._final + (1 - self._final) * math.cos(math.pi / 2 * update / updates) ** 2
        if self._kind == "step":
            return self._factor ** (update * self._every.denominator // (updates * self._every.numerator))
        return 1.0


class Optimiser:
    """Takes steps on dictionaries of parameters [N, ...]; holds no state that training changes.

    Args:
        config: any trial of the pack: its optimiser and momentum.
        step_sizes: of each lane, float64, N values of any shape.
        weight_decays: likewise. Added to the gradient as λ·w; for adamw w is multiplied by 1 − η·λ instead.
        rate_factors: multiplies the step size of a parameter (by name; 1 where it is not listed), and with
            it the steps of adam, too, and the decay of adamw (`trials.engine.networks.rate_factor`).
        device: of the parameters.
        dtype: of the parameters. Step sizes and bias corrections are computed in float64 and then rounded to it.

    Raises:
        ValueError: where the optimiser is unknown, or is `momentum` and the config has none.
    """

    def __init__(
        self,
        config: TrialConfig,
        step_sizes: Tensor,
        weight_decays: Tensor,
        rate_factors: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        if config.optimiser not in OPTIMISERS:
            raise ValueError(f"unknown optimiser {config.optimiser!r}; known: {', '.join(OPTIMISERS)}")
        if config.optimiser == "momentum" and config.momentum is None:
            raise ValueError("the optimiser `momentum` needs a momentum, such as 0.9")
        self._kind, self._momentum, self._dtype = config.optimiser, config.momentum or 0.0, dtype
        self._step_sizes = step_sizes.reshape(-1).to(device, torch.float64)
        self._rate_factors = dict(rate_factors or {})
        self._decays = weight_decays.reshape(-1).to(device, torch.float64)
        self._coupled_decays = self._decays.to(dtype)
        # Asked once and here: asking the device at each step would wait for it.
        self._decoupled = self._kind == "adamw" and bool(self._decays.any())
        self._coupled = self._kind != "adamw" and bool(self._decays.any())

    def initial(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state before the first step, each tensor [N, ...]: zeros.

        `momentum` has a "{parameter}.velocity", adam and adamw "{parameter}.first", "{parameter}.second"
        (moments) and `STEPS` (float64 [N]); sgd has none.
        """
        kinds = {"sgd": (), "momentum": ("velocity",)}.get(self._kind, ("first", "second"))
        state = {
            f"{name}.{kind}": torch.zeros_like(value, requires_grad=False)
            for name, value in parameters.items()
            for kind in kinds
        }
        if self._kind in ("adam", "adamw"):
            state[STEPS] = torch.zeros_like(self._step_sizes)
        return state

    @torch.no_grad()
    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        factor: Tensor | float = 1.0,
    ) -> None:
        """Take one step, in place on `parameters` and `state`; nothing waits for the device.

        Args:
            parameters: [N, ...] each.
            gradients: of each lane's own loss, under the same names; left as they are.
            state: as `initial` made it.
            factor: of the schedule; a tensor (float64, no axes) where the step is captured in a CUDA graph.
        """
        correction, floor = None, None
        if self._kind in ("adam", "adamw"):
            # −expm1(n·log β) is 1 − βⁿ without cancellation. The second correction is moved from the
            # denominator to the rate and to ε, which saves one pass over the parameters.
            steps = state[STEPS].add_(1)
            first, second = (-torch.expm1(steps * math.log(beta)) for beta in BETAS)
            root = second.sqrt_()
            correction, floor = root / first, (root * EPS).to(self._dtype)
        rates: dict[float, tuple[Tensor, Tensor | None]] = {}
        for name, parameter in parameters.items():
            gradient = gradients[name]
            rate_factor = self._rate_factors.get(name, 1.0)
            if rate_factor not in rates:
                rates[rate_factor] = self._rates(factor * rate_factor, correction)
            rate, shrink = rates[rate_factor]
            if self._coupled:
                gradient = torch.addcmul(gradient, parameter, _like(self._coupled_decays, parameter))
            if shrink is not None:
                parameter.mul_(_like(shrink, parameter))
            if self._kind == "momentum":
                gradient = state[f"{name}.velocity"].mul_(self._momentum).add_(gradient)
            if floor is not None:
                first = state[f"{name}.first"].lerp_(gradient, 1 - BETAS[0])
                second = state[f"{name}.second"].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
                scale = second.sqrt().add_(_like(floor, parameter))
                gradient = torch.div(first, scale, out=scale)
            parameter.addcmul_(gradient, _like(rate, parameter), value=-1)

    def _rates(self, factor: Tensor | float, correction: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What each lane's step is multiplied by, and for adamw its weights before that, [N]."""
        rates = self._step_sizes * factor
        shrink = (1 - rates * self._decays).to(self._dtype) if self._decoupled else None
        return (rates if correction is None else rates * correction).to(self._dtype), shrink


def _like(per_lane: Tensor, parameter: Tensor) -> Tensor:
    """[N] → [N, 1, ...]."""
    return per_lane.view(-1, *[1] * (parameter.dim() - 1))


def _simplest(share: float) -> Fraction:
    """The fraction a decimal share was meant as: 0.1 is a tenth, which no float is."""
    return Fraction(share).limit_denominator(_LARGEST_DENOMINATOR) or Fraction(share)
