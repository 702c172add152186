"""A pack of trials trained together: lanes stacked as [seeds, learning rates], one epoch per step.

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

A trial run alone is a pack of one lane, by the same code. Reruns of one pack with the same number
of threads on the same kind of machine agree bit for bit; with another number of threads, or in a
pack of another shape, the products are summed in another order and agree to rounding.

Order of samples: epoch e of seed s visits the training split in the order
`numpy.random.default_rng([s, e]).permutation(n)`; what does not fill a last batch is dropped.
"""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trials.engine.data import Dataset, Split
from trials.engine.models import MLP
from trials.records import METRICS, Pack, Reason, TrialResult, TrialState

_BLOCK_VALUES = 2**26  # float32 values that the chunk of one block of seeds may take: 256 MiB
_EVALUATION_VALUES = 2**20  # the same for one layer's output in evaluation: about a core's cache


class PackRun:
    """Trains a pack, epoch by epoch.

    Args:
        pack: trials of one shape, rectangular: every seed with the same learning rates.
        dataset: the data set, split; its arrays are read in place (on the CPU), never written.
        device: where to train.
        dtype: float64 serves to check float32.

    Raises:
        ValueError: where the pack is not rectangular, or asks for larger batches than the
            training split holds.
    """

    def __init__(
        self,
        pack: Pack,
        dataset: Dataset,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        config, count = pack.config, len(dataset.train.labels)
        _check(pack, count)
        self.pack = pack
        self.epoch = 0
        self._epochs = config.epochs
        self._steps = count // config.batch_size
        self._classes = dataset.classes
        features = dataset.train.inputs.shape[1]
        sizes = [features, *[config.width] * config.depth, dataset.classes]
        train, *held_out = (
            _tensors(split, device, dtype) for split in (dataset.train, dataset.validation, dataset.test)
        )
        self._held_out = held_out
        per_block = _seeds_per_block(sizes, len(pack.learning_rates), config.batch_size)
        self.trainers = [
            EpochTrainer(
                MLP(
                    sizes,
                    config.activation,
                    config.normaliser,
                    pack.seeds[start : start + per_block],
                    len(pack.learning_rates),
                    device,
                    dtype,
                ),
                pack.seeds[start : start + per_block],
                pack.learning_rates,
                config.batch_size,
                train,
            )
            for start in range(0, len(pack.seeds), per_block)
        ]
        self._diverged_at: list[int | None] = [None] * len(pack.trials)
        self._curves: list[dict[str, list[float | None]]] = [{metric: [] for metric in METRICS} for _ in pack.trials]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or every lane has diverged."""
        return self.epoch == self._epochs or None not in self._diverged_at

    @torch.inference_mode()
    def step(self) -> None:
        """Train all lanes for one epoch and evaluate them.

        A lane whose losses or weights are not finite ends here, with this epoch as its last. It
        keeps its place, so that the others' arithmetic stays the same to the last bit.

        Raises:
            RuntimeError: where the run has finished.
        """
        if self.finished:
            raise RuntimeError(f"pack {self.pack.label} has finished")
        lane = 0
        for block in self.trainers:
            lanes = range(lane, lane + block.model.lanes)
            lane = lanes.stop
            if any(self._diverged_at[i] is None for i in lanes):
                metrics, finite = self._block_epoch(block)
                self._record(lanes, metrics, finite)
        self.epoch += 1

    def results(self) -> tuple[TrialResult, ...]:
        """One result per trial, in the pack's order.

        Raises:
            RuntimeError: where the run has not finished.
        """
        if not self.finished:
            raise RuntimeError(f"pack {self.pack.label} is at epoch {self.epoch} of {self._epochs}")
        results = []
        for config, diverged_at, curves in zip(self.pack.trials, self._diverged_at, self._curves, strict=True):
            epochs = self.epoch if diverged_at is None else diverged_at
            updates = epochs * self._steps
            results.append(
                TrialResult(
                    config=config,
                    state=TrialState.SUCCEEDED if diverged_at is None else TrialState.DIVERGED,
                    reason=None if diverged_at is None else Reason.NON_FINITE_LOSS,
                    epochs_completed=epochs,
                    updates=updates,
                    samples=updates * config.batch_size,
                    chance_accuracy=1 / self._classes,
                    curves={metric: tuple(values) for metric, values in curves.items()},
                )
            )
        return tuple(results)

    def _block_epoch(self, block: "EpochTrainer") -> tuple[dict[str, list[float]], list[bool]]:
        """One epoch of one block: its lanes' metrics, and which lanes are still finite."""
        train_loss = block.train_epoch(self.epoch) / (self._steps * block.batch_size)
        (validation_loss, validation_accuracy), (test_loss, test_accuracy) = (
            evaluate(block.model, *split) for split in self._held_out
        )
        values = (train_loss, validation_loss, validation_accuracy, test_loss, test_accuracy)
        finite = torch.stack([train_loss, validation_loss, test_loss, block.model.squared_norms()]).isfinite().all(0)
        return {metric: value.tolist() for metric, value in zip(METRICS, values, strict=True)}, finite.tolist()

    def _record(self, lanes: range, metrics: dict[str, list[float]], finite: list[bool]) -> None:
        for place, lane in enumerate(lanes):
            if self._diverged_at[lane] is not None:
                continue
            for metric, values in metrics.items():
                value = values[place]
                self._curves[lane][metric].append(value if math.isfinite(value) else None)
            if not finite[place]:
                self._diverged_at[lane] = self.epoch + 1


class _Room(NamedTuple):
    """Buffers of one chunk of samples."""

    raw: Tensor  # [G · samples, features]
    inputs: Tensor  # normalised and augmented, [G, samples, padded]
    products: Tensor  # the inputs' inner products, [G, samples, samples]
    outputs: Tensor  # of the first map as it was at the chunk's start, [G, L·out, samples]
    steps_taken: Tensor  # learning rate × gradient of the first map's outputs, [G, L·out, samples]


class EpochTrainer:
    """The seeds of a pack that are trained together: all of them, unless their batches would fill the memory."""

    def __init__(
        self,
        model: MLP,
        seeds: Sequence[int],
        learning_rates: Sequence[float],
        batch_size: int,
        train: tuple[Tensor, Tensor],
    ):
        self.model, self.seeds, self.batch_size = model, seeds, batch_size
        self._inputs, self._labels = train
        self._steps = len(self._labels) // batch_size
        self._chunk = min(self._steps, _steps_per_chunk(model.weights[0].shape[1], batch_size))
        weight = model.weights[0]
        self._one_hot = torch.eye(model.sizes[-1], dtype=weight.dtype, device=weight.device)
        # Dividing by B here makes the loss a mean over the batch; over lanes it is a sum.
        rates = torch.tensor(learning_rates, dtype=torch.float64).repeat(model.groups) / batch_size
        self._rates = rates.to(weight.device, weight.dtype).view(-1, 1, 1)
        self._rooms: dict[int, _Room] = {}

    def train_epoch(self, epoch: int) -> Tensor:
        """Sum over the epoch of each lane's sample losses, [N] in float64."""
        count, used = len(self._labels), self._steps * self.batch_size
        orders = np.stack([np.random.default_rng([seed, epoch]).permutation(count)[:used] for seed in self.seeds])
        order = torch.from_numpy(orders).to(self._labels.device)
        losses = [self._train_chunk(rows) for rows in order.split(self._chunk * self.batch_size, dim=1)]
        return torch.stack(losses).sum(0)

    def _train_chunk(self, rows: Tensor) -> Tensor:
        """Train on the samples `rows` [G, k·B], k batches in sequence; returns the sum of sample losses, [N]."""
        model, batch = self.model, self.batch_size
        groups, samples = rows.shape
        room = self._room(samples)
        raw = torch.index_select(self._inputs, 0, rows.reshape(-1), out=room.raw)
        batches = (groups, samples // batch, batch)
        inputs = room.inputs
        model.normalisers[0].train(raw.view(*batches, -1).mT, model.augmented(inputs.view(*batches, -1)))
        labels = self._labels[rows]
        targets = self._lanes(self._one_hot[labels].mT)

        weight, steps_taken = model.weights[0], room.steps_taken
        outputs = torch.bmm(weight, inputs.mT, out=room.outputs)
        products = torch.bmm(inputs, inputs.mT, out=room.products) if samples > batch else room.products
        all_logits = []
        for start in range(0, samples, batch):
            stop = start + batch
            z = outputs[:, :, start:stop]
            if start:
                z = torch.baddbmm(z, steps_taken[:, :, :start], products[:, :start, start:stop], alpha=-1)
            logits = model.train_forward(z.contiguous())
            all_logits.append(logits)
            gradient = torch.softmax(logits, 1).sub_(targets[:, :, start:stop]).mul_(self._rates)
            steps_taken[:, :, start:stop] = model.train_backward(gradient)
        weight.baddbmm_(steps_taken, inputs, alpha=-1)
        return _losses(torch.cat(all_logits, -1), self._lanes(labels[:, None])).sum(-1, dtype=torch.float64)

    def _room(self, samples: int) -> "_Room":
        """The buffers of a chunk of `samples`; kept, as fresh pages cost more than what is written to them."""
        if samples not in self._rooms:
            weight, groups = self.model.weights[0], self.model.groups
            self._rooms[samples] = _Room(
                raw=weight.new_empty(groups * samples, self._inputs.shape[1]),
                inputs=self.model.input_buffer(groups, samples),
                products=weight.new_empty(groups, samples, samples if samples > self.batch_size else 0),
                outputs=weight.new_empty(*weight.shape[:2], samples),
                steps_taken=weight.new_empty(*weight.shape[:2], samples),
            )
        return self._rooms[samples]

    def _lanes(self, per_group: Tensor) -> Tensor:
        """[G, ...] → [N, ...]: what a group has, for each of its lanes."""
        return per_group.repeat_interleave(self.model.lanes_per_seed, dim=0)


def evaluate(model: MLP, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy (nats) and accuracy of each lane, [N] each in float64, over a whole split.

    Accuracy is NaN where the loss is not finite. Memory is bounded: the split is taken in chunks.
    """
    widest = model.lanes * max(model.sizes[1:])
    copies = model.groups if model.normalisers[0].separate_in_evaluation else 1
    chunk = max(16, min(_EVALUATION_VALUES // widest, 4 * _EVALUATION_VALUES // (copies * model.padded)))
    loss = torch.zeros(model.lanes, dtype=torch.float64, device=labels.device)
    correct = torch.zeros_like(loss)
    for some_inputs, some_labels in zip(inputs.split(chunk), labels.split(chunk), strict=True):
        logits = model.evaluate(some_inputs)
        loss += _losses(logits, some_labels.expand(model.lanes, 1, -1)).sum(-1, dtype=torch.float64)
        correct += (logits.argmax(1) == some_labels).sum(-1)
    loss /= len(labels)
    return loss, torch.where(loss.isfinite(), correct / len(labels), torch.nan)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each sample, [N, n], from logits [N, classes, n] and labels [N, 1, n]."""
    return torch.log_softmax(logits, 1).gather(1, labels).squeeze(1).neg_()


def _steps_per_chunk(rows: int, batch_size: int) -> int:
    """Steps per chunk for a first map with `rows` outputs per seed.

    Inner products cost as much per sample as chunk/(2·rows) of the map itself, so few rows want
    short chunks; the limits are where longer ones stopped paying (`benchmarks/engine.py`).
    """
    return max(1, min(128, max(32, rows // 4)) // batch_size)


def _seeds_per_block(sizes: Sequence[int], lanes_per_seed: int, batch_size: int) -> int:
    rows = lanes_per_seed * sizes[1]
    samples = _steps_per_chunk(rows, batch_size) * batch_size
    values = samples * (2 * sizes[0] + 6 * lanes_per_seed * sum(sizes[1:]))
    return max(1, _BLOCK_VALUES // values)


def _check(pack: Pack, count: int) -> None:
    lanes = [(seed, rate) for seed in pack.seeds for rate in pack.learning_rates]
    if [(trial.seed, trial.learning_rate) for trial in pack.trials] != lanes:
        raise ValueError(f"pack {pack.label} is not every seed with every learning rate, in order")
    if pack.config.batch_size > count:
        raise ValueError(f"batch size {pack.config.batch_size} is larger than the {count} training samples")


def _tensors(split: Split, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The split on the device; on the CPU in float32 without a copy, though shared memory may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        inputs, labels = torch.from_numpy(split.inputs), torch.from_numpy(split.labels)
    return inputs.to(device, dtype), labels.to(device)
