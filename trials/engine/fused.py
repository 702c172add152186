"""The fast path: multilayer perceptrons under plain gradient descent, with gradients by hand.

How it is made fast (measured in `benchmarks/engine.py`), in the order of what it brings:

1. Lanes of one seed share their batches, so the first affine map, nearly all of the arithmetic,
   is one dense product per seed.
2. The learning rate is folded into the gradient of the loss: a lane's step is `W −= gradient`.
   Over lanes the loss is summed, never averaged, so no lane feels another.
3. The first map's gradient is never materialised: `W₁ −= D Xᵀ` in one call.
4. Batches are taken in chunks of k steps. Within a chunk W₁ stays as it was at the chunk's
   start; what the steps i < j have added to it is given to step j through the inner products
   of the inputs,

       W₁⁽ʲ⁾ x_j = W₁⁽⁰⁾ x_j − Σ_{i<j} D_i (x_iᵀ x_j),

   which is exact (the first map's input does not depend on weights) and costs next to nothing,
   as all lanes of a seed share the x_iᵀ x_j. So W₁ is read and written once per chunk, and
   batches of 4 run at the speed of batches of 64.

`trials.engine.general` trains the same networks through autograd, and the tests hold the two
against each other.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trials.engine.fused_mlp import MLP
from trials.engine.fused_normalisers import BatchNorm
from trials.engine.graphs import Captured
from trials.engine.lanes import Lanes
from trials.engine.networks import make_network, rate_factor
from trials.engine.optim import Schedule
from trials.engine.products import product, subtract_product
from trials.records import TrialConfig

_EVALUATION_VALUES = 2**20  # float32 values of one layer's output in evaluation: about a core's cache
_NOMINAL_LANES = 32  # chunks must not depend on how many lanes there happen to be


def is_fusible(config: TrialConfig) -> bool:
    """Whether this path trains such trials: an MLP under plain SGD, normalised before each map, without extras."""
    return (
        config.model == "mlp"
        and config.optimiser == "sgd"
        and config.weight_decay == 0
        and config.placement == "pre"
        and not config.gain
    )


@dataclass(frozen=True)
class Room:
    """Buffers of one chunk of samples; kept, as fresh pages cost more than what is written to them."""

    rows: Tensor  # of the training split, [G, samples]
    factors: Tensor  # of the learning rate at each of the chunk's steps, [steps]
    raw: Tensor  # [G · samples, features]
    inputs: Tensor  # normalised and augmented, [G, samples, padded]
    products: Tensor  # the inputs' inner products, [G, samples, samples]
    outputs: Tensor  # of the first map as it was at the chunk's start, [G, L·out, samples]
    steps_taken: Tensor  # learning rate × gradient of the first map's outputs, [G, L·out, samples]


class FusedTrainer:
    """A block of lanes on the fast path (see `trials.engine.lanes.Trainer`).

    Args:
        config: a trial of the pack, one that `is_fusible`.
        lanes: the block's seeds and step sizes.
        shape: (channels, height, width) of a sample.
        classes: number of classes.
        train: the training split, inputs [n, features] and labels [n], on the device.
        updates: optimiser steps of the whole budget.
        slots: lanes per seed in the whole pack. The length of a chunk follows from it and not from
            this block's, so that a lane's numbers do not depend on how many lanes are left.
        rooms: buffers by shape, shared by the blocks of a pack, as they train in turn.
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
        slots: int,
        rooms: dict[tuple[int, ...], "Room"] | None = None,
    ):
        groups, per_seed = lanes.step_sizes.shape
        self._inputs, self._labels = train
        sizes = [self._inputs.shape[1], *[config.width] * config.depth, classes]
        self.model = MLP(sizes, config.activation, config.normaliser, lanes.seeds, per_seed, device, dtype)
        self.lanes = groups * per_seed
        self._batch_size, self._updates = config.batch_size, updates
        self._maps = make_network(config, shape, classes).affine_maps
        self._schedule = None if config.schedule == "constant" else Schedule(config)
        self._chunk = _steps_per_chunk(slots * sizes[1], config.batch_size)
        weight = self.model.weights[0]
        self._one_hot = torch.eye(classes, dtype=weight.dtype, device=weight.device)
        # Dividing by B here makes the loss a mean over the batch; over lanes it is a sum.
        rates = lanes.step_sizes.reshape(-1, 1, 1) * (rate_factor(config) / config.batch_size)
        self._rates = rates.to(weight.device, weight.dtype)
        self._rooms = {} if rooms is None else rooms
        self._chunks: dict[int, tuple[Room, Captured]] = {}

    @torch.inference_mode()
    def train(self, orders: Tensor, first_update: int) -> Tensor:
        losses = [
            self._train_chunk(rows, first_update + index * self._chunk)
            for index, rows in enumerate(orders.split(self._chunk * self._batch_size, dim=1))
        ]
        return torch.stack(losses).sum(0)

    @torch.inference_mode()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        values = max(_NOMINAL_LANES * max(model.sizes[1:]), model.padded * 2)
        chunk = max(16, _EVALUATION_VALUES // values)
        loss = torch.zeros(self.lanes, dtype=torch.float64, device=labels.device)
        correct = torch.zeros_like(loss)
        for some_inputs, some_labels in zip(inputs.split(chunk), labels.split(chunk), strict=True):
            logits = model.evaluate(some_inputs)
            loss += _losses(logits, some_labels.expand(self.lanes, 1, -1)).sum(-1, dtype=torch.float64)
            correct += (logits.argmax(1) == some_labels).sum(-1)
        loss /= len(labels)
        return loss, torch.where(loss.isfinite(), correct / len(labels), torch.nan)

    def squared_norms(self) -> Tensor:
        return self.model.squared_norms()

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        state = {}
        for name, matrix, normaliser in zip(self._maps, self._matrices(), self.model.normalisers, strict=True):
            state[f"{name}.weight"], state[f"{name}.bias"] = matrix[..., :-1].clone(), matrix[..., -1].clone()
            if isinstance(normaliser, BatchNorm):
                state[f"{name}.mean"] = self._per_lane(normaliser.running_mean)
                state[f"{name}.variance"] = self._per_lane(normaliser.running_variance)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, matrix, normaliser in zip(self._maps, self._matrices(), self.model.normalisers, strict=True):
            matrix[..., :-1], matrix[..., -1] = state[f"{name}.weight"], state[f"{name}.bias"]
            if isinstance(normaliser, BatchNorm):
                normaliser.running_mean.copy_(self._shared(state[f"{name}.mean"], normaliser.running_mean))
                normaliser.running_variance.copy_(self._shared(state[f"{name}.variance"], normaliser.running_mean))

    def _matrices(self) -> list[Tensor]:
        """Views of the lanes' [W b], [N, out, in + 1]."""
        model = self.model
        first = model.weights[0].view(self.lanes, -1, model.padded)[..., : model.sizes[0] + 1]
        return [first, *model.weights[1:]]

    def _per_lane(self, statistics: Tensor) -> Tensor:
        """[G or N, n, 1] → [N, n]: the first map's are one per seed."""
        return statistics.squeeze(-1).repeat_interleave(self.lanes // len(statistics), dim=0)

    def _shared(self, per_lane: Tensor, like: Tensor) -> Tensor:
        return per_lane[:: self.lanes // len(like)].unsqueeze(-1)

    def _train_chunk(self, rows: Tensor, first_update: int) -> Tensor:
        """Train on the samples `rows` [G, k·B], k batches in sequence; returns the sum of sample losses, [N]."""
        samples = rows.shape[1]
        if samples not in self._chunks:
            room = self._room(samples)
            changed = [*self.model.weights, *self._statistics()]
            owner = weakref.proxy(self)  # a cycle would keep the memory of a block that has been laid out anew
            self._chunks[samples] = room, Captured(lambda: owner._chunk_losses(room), changed)
        room, losses = self._chunks[samples]
        room.rows.copy_(rows)
        if self._schedule is not None:
            steps = range(first_update, first_update + len(room.factors))
            factors = [self._schedule.factor(update, self._updates) for update in steps]
            room.factors.copy_(torch.tensor(factors, dtype=torch.float64))
        return losses().clone()

    def _chunk_losses(self, room: Room) -> Tensor:
        model, batch = self.model, self._batch_size
        groups, samples = room.rows.shape
        raw = torch.index_select(self._inputs, 0, room.rows.view(-1), out=room.raw)
        batches = (groups, samples // batch, batch)
        inputs, normaliser = room.inputs, model.normalisers[0]
        scale = normaliser.train(raw.view(*batches, -1).mT, model.augmented(inputs.view(*batches, -1)))
        weighing = scale.view(groups, 1, samples) if normaliser.weighs_samples and scale is not None else None
        labels = self._labels[room.rows]
        targets = self._lanes(self._one_hot[labels].mT)

        weight, steps_taken = model.weights[0], room.steps_taken
        outputs = product(weight, inputs, room.outputs)
        products = product(inputs, inputs, room.products) if samples > batch else room.products
        all_logits = []
        for step, start in enumerate(range(0, samples, batch)):
            stop = start + batch
            z = outputs[:, :, start:stop]
            if start:
                z = torch.baddbmm(z, steps_taken[:, :, :start], products[:, :start, start:stop], alpha=-1)
            logits = model.train_forward(z.contiguous())
            all_logits.append(logits)
            rates = self._rates if self._schedule is None else self._rates * room.factors[step]
            gradient = torch.softmax(logits, 1).sub_(targets[:, :, start:stop]).mul_(rates)
            gradient = model.train_backward(gradient)
            steps_taken[:, :, start:stop] = gradient if weighing is None else gradient * weighing[:, :, start:stop]
        subtract_product(weight, steps_taken, inputs)
        return _losses(torch.cat(all_logits, -1), self._lanes(labels[:, None])).sum(-1, dtype=torch.float64)

    def _room(self, samples: int) -> Room:
        weight, groups = self.model.weights[0], self.model.groups
        shape = (groups, weight.shape[1], samples)
        if shape not in self._rooms:
            self._rooms[shape] = self._new_room(samples)
        return self._rooms[shape]

    def _new_room(self, samples: int) -> Room:
        weight, groups = self.model.weights[0], self.model.groups
        return Room(
            rows=self._labels.new_empty(groups, samples),
            factors=weight.new_ones(samples // self._batch_size),
            raw=weight.new_empty(groups * samples, self._inputs.shape[1]),
            inputs=self.model.input_buffer(groups, samples),
            products=weight.new_empty(groups, samples, samples if samples > self._batch_size else 0),
            outputs=weight.new_empty(*weight.shape[:2], samples),
            steps_taken=weight.new_empty(*weight.shape[:2], samples),
        )

    def _statistics(self) -> list[Tensor]:
        batch_norms = [n for n in self.model.normalisers if isinstance(n, BatchNorm)]
        return [tensor for norm in batch_norms for tensor in (norm.running_mean, norm.running_variance)]

    def _lanes(self, per_group: Tensor) -> Tensor:
        """[G, ...] → [N, ...]: what a group has, for each of its lanes."""
        return per_group.repeat_interleave(self.model.lanes_per_seed, dim=0)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample, [N, n], from logits [N, classes, n] and labels [N, 1, n]."""
    return torch.log_softmax(logits, 1).gather(1, labels).squeeze(1).neg_()


def _steps_per_chunk(rows: int, batch_size: int) -> int:
    """Steps per chunk for a first map with `rows` outputs per seed.

    Inner products cost as much per sample as chunk/(2·rows) of the map itself, so few rows want
    short chunks; the limits are where longer ones stopped paying (`benchmarks/engine.py`).
    """
    return max(1, min(128, max(32, rows // 4)) // batch_size)
