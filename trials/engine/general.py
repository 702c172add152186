"""The general path: any lane network under any optimiser, with gradients from autograd.

The training split stays on the device and a step takes its rows from there. On CUDA a step is one
graph. `trials.engine.fused` is the fast path for plain perceptrons; the tests hold the two against
each other.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trials.engine.graphs import Captured
from trials.engine.lanes import Lanes
from trials.engine.networks import LaneNetwork, make_network
from trials.engine.optim import Optimiser, Schedule
from trials.records import TrialConfig

_EVALUATION_VALUES = 2**20  # values of the largest tensor in evaluation, with `_NOMINAL_LANES`: about a core's cache
_EVALUATION_VALUES_CUDA = 2**26  # a GPU wants large kernels; chosen without one, by memory alone
_NOMINAL_LANES = 32  # chunks must not depend on how many lanes there happen to be
_SMALLEST_CHUNK = 16


class _Carried(NamedTuple):
    """All that lanes carry, each tensor [N, ...]."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimiser: dict[str, Tensor]

    def all(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers, **self.optimiser}


class _Room(NamedTuple):
    """What a step reads and writes besides; the same memory at each step, as a CUDA graph needs it."""

    rows: Tensor  # of the training split, int64 [G, B]
    factor: Tensor  # of the schedule, float64, no axes
    losses: Tensor  # sum of the sample losses so far, float64 [N]


class GeneralTrainer:
    """A block of lanes under autograd (see `trials.engine.lanes.Trainer`).

    A step keeps the activations of N · B samples for its gradient; the caller bounds N.

    Args:
        config: any trial of the pack; its learning rate, weight decay and seed are not read.
        lanes: the block's seeds, step sizes and weight decays.
        shape: (channels, height, width) of a sample.
        classes: number of classes.
        train: the training split, inputs [n, features] and labels int64 [n], on the device.
        updates: optimiser steps of the whole budget, for the schedule.
        device: where to train.
        dtype: of parameters and inputs; float64 serves to check float32.

    Raises:
        ValueError: where the network does not fit the data, or an option is unknown.
    """

    def __init__(
        self,
        config: TrialConfig,
        lanes: Lanes,
        shape: tuple[int, int, int],
        classes: int,
        train: tuple[Tensor, Tensor],
        updates: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        groups, slots = lanes.step_sizes.shape
        self.lanes = groups * slots
        self._batch_size, self._updates, self._schedule = config.batch_size, updates, Schedule(config)
        self._network = network = make_network(config, shape, classes)
        by_seed = [network.initial(seed) for seed in lanes.seeds]
        parameters = {
            name: torch.stack([initial[name] for initial in by_seed])
            .repeat_interleave(slots, dim=0)
            .to(device, dtype)
            .requires_grad_()
            for name in by_seed[0]
        }
        buffers = {
            name: value.to(device, dtype).repeat(self.lanes, *[1] * value.dim())
            for name, value in network.buffers().items()
        }
        factors = network.rate_factors(parameters)
        optimiser = Optimiser(config, lanes.step_sizes, lanes.weight_decays, factors, device, dtype)
        self._carried = carried = _Carried(parameters, buffers, optimiser.initial(parameters))
        self._room = room = _Room(
            rows=torch.zeros(groups, config.batch_size, dtype=torch.int64, device=device),
            factor=torch.ones((), dtype=torch.float64, device=device),
            losses=torch.zeros(self.lanes, dtype=torch.float64, device=device),
        )
        step = partial(_train_step, network, optimiser, train, carried, room)
        self._step = Captured(step, [*carried.all().values(), room.losses])
        values = _EVALUATION_VALUES_CUDA if torch.device(device).type == "cuda" else _EVALUATION_VALUES
        per_lane = _values_per_sample(network, carried, shape)
        self._chunk = max(_SMALLEST_CHUNK, values // (_NOMINAL_LANES * per_lane))

    @torch.no_grad()
    def train(self, orders: Tensor, first_update: int) -> Tensor:
        batches = orders.split(self._batch_size, dim=1)
        last = first_update + len(batches)
        factors = [self._schedule.factor(update, self._updates) for update in range(first_update, last)]
        on_device = torch.tensor(factors, dtype=torch.float64, device=orders.device)
        self._room.losses.zero_()
        for rows, factor in zip(batches, on_device, strict=True):
            self._room.rows.copy_(rows)
            self._room.factor.copy_(factor)
            self._step()
        return self._room.losses.clone()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        parameters, buffers, _ = self._carried
        loss = torch.zeros(self.lanes, dtype=torch.float64, device=labels.device)
        correct = torch.zeros_like(loss)
        for some_inputs, some_labels in zip(inputs.split(self._chunk), labels.split(self._chunk), strict=True):
            logits = self._network.forward(parameters, buffers, some_inputs[None], training=False)
            loss += _losses(logits, some_labels[None]).sum(1, dtype=torch.float64)
            correct += (logits.argmax(-1) == some_labels).sum(1)
        loss /= len(labels)
        return loss, torch.where(loss.isfinite(), correct / len(labels), torch.nan)

    @torch.no_grad()
    def squared_norms(self) -> Tensor:
        norms = [value.square().view(self.lanes, -1).sum(1) for value in self._carried.parameters.values()]
        return torch.stack(norms).sum(0)

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Copies of all that lanes carry, under the names of the network and of `Optimiser.initial`."""
        return {name: value.clone() for name, value in self._carried.all().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what lanes carried elsewhere, one row per lane of this block.

        Raises:
            RuntimeError: where names or shapes are not this block's; then nothing has been changed.
        """
        own = self._carried.all()
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        given = {name: tuple(value.shape) for name, value in state.items()}
        if given != shapes:
            names = sorted(name for name in given.keys() | shapes.keys() if given.get(name) != shapes.get(name))
            raise RuntimeError(
                f"the state is of another network, optimiser or number of lanes: {names[0]} "
                f"is {given.get(names[0], 'missing')}, here {shapes.get(names[0], 'missing')}"
            )
        for name, value in own.items():
            value.copy_(state[name])


def _train_step(
    network: LaneNetwork, optimiser: Optimiser, train: tuple[Tensor, Tensor], carried: _Carried, room: _Room
) -> Tensor:
    """One step of all lanes; a function and not a method, so that the trainer is in no cycle (see `Captured`)."""
    inputs, labels = (values[room.rows] for values in train)
    with torch.enable_grad():
        logits = network.forward(carried.parameters, carried.buffers, inputs, training=True)
        losses = _losses(logits, labels)
    # A mean over the batch and a sum over lanes, without adding up lanes.
    weights = losses.new_full((), 1 / losses.shape[1]).expand_as(losses)
    gradients = torch.autograd.grad(losses, list(carried.parameters.values()), weights)
    optimiser.step(
        carried.parameters, dict(zip(carried.parameters, gradients, strict=True)), carried.optimiser, room.factor
    )
    return room.losses.add_(losses.detach().sum(1, dtype=torch.float64))


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample, [N, B], from logits [N, B, classes] and labels [G, B] or [1, B]."""
    lanes, batch = logits.shape[:2]
    targets = labels.repeat_interleave(lanes // len(labels), dim=0)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(lanes, batch)


class _Sizes(TorchFunctionMode):
    """Notes the number of values of each tensor that a function of PyTorch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes += [value.numel() for value in _flat(result) if isinstance(value, Tensor)]
        return result


def _flat(result: Any) -> Any:
    return result if isinstance(result, tuple | list) else (result,)


@torch.no_grad()
def _values_per_sample(network: LaneNetwork, carried: _Carried, shape: tuple[int, int, int]) -> int:
    """Values per sample of one lane's largest tensor in evaluation: by how much it grows with a second sample."""
    parameters, buffers = (
        {name: value[:1] for name, value in tensors.items()} for tensors in (carried.parameters, carried.buffers)
    )
    like = next(iter(parameters.values()))
    sizes = []
    for samples in (1, 2):
        inputs = like.new_zeros(1, samples, math.prod(shape))
        with _Sizes() as noted:
            network.forward(parameters, buffers, inputs, training=False)
        sizes.append(noted.sizes)
    # Tensors of weights alone do not grow.
    return max(1, *(two - one for one, two in zip(*sizes, strict=True)))
