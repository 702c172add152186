"""A pack of trials trained together: blocks of lanes, one epoch per step, checkpoints, and what came out.

A trial run alone is a pack of one lane, by the same code. Reruns of one pack with the same number
of threads and of lanes at once on the same kind of machine agree bit for bit; otherwise products
may be summed in another order, and numbers agree to rounding.

Order of samples: epoch e of seed s visits the training split in the order
`numpy.random.default_rng([s, e]).permutation(n)`; what does not fill a last batch is dropped. A
budget in updates or samples may end within an epoch.
"""

import math
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trials.engine import checkpoints
from trials.engine.dataset import Dataset, Split
from trials.engine.errors import is_out_of_memory
from trials.engine.fused import FusedTrainer, Room, is_fusible
from trials.engine.general import GeneralTrainer
from trials.engine.graphs import set_numerics
from trials.engine.lanes import Block, Lanes, Trainer, lay_out
from trials.engine.networks import make_network
from trials.engine.probes import probe
from trials.records import METRICS, Pack, Probe, Reason, TrialResult, TrialState


class PackRun:
    """Trains a pack, epoch by epoch.

    Args:
        pack: trials of one shape, rectangular: every seed with the same settings.
        dataset: the data set, split; its arrays are read in place (on the CPU), never written.
        device: where to train.
        dtype: float64 serves to check float32.
        lanes_at_once: how many trials train side by side; all of them when left out.

    Raises:
        ValueError: where the pack is not rectangular, asks for larger batches than the training
            split holds, or its network does not fit the data.
    """

    def __init__(
        self,
        pack: Pack,
        dataset: Dataset,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        lanes_at_once: int | None = None,
    ):
        config, count = pack.config, len(dataset.train.labels)
        _check(pack, count)
        set_numerics(device)
        self.pack = pack
        self.epoch = 0
        self.lanes_at_once = min(lanes_at_once or len(pack.trials), len(pack.trials))
        self.updates = config.updates(count)
        self.steps = count // config.batch_size
        self.epochs = math.ceil(self.updates / self.steps)
        self._shape, self._classes = dataset.shape, dataset.classes
        self.device, self._dtype = torch.device(device), dtype
        self._train, *self._held_out = (
            _tensors(split, device, dtype) for split in (dataset.train, dataset.validation, dataset.test)
        )
        self._network = make_network(config, dataset.shape, dataset.classes)
        self._probes_every = config.probe_every
        self._ended_at: list[int | None] = [None] * len(pack.trials)
        self._pruned = [False] * len(pack.trials)
        self._curves: list[dict[str, list[float | None]]] = [{metric: [] for metric in METRICS} for _ in pack.trials]
        self._probes: list[list[Probe]] = [[] for _ in pack.trials]
        self.blocks: list[tuple[Block, Trainer]] = []
        self._rooms: dict[tuple[int, ...], Room] = {}
        self._build(range(len(pack.trials)))

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or every lane has ended before."""
        return self.epoch == self.epochs or None not in self._ended_at

    @property
    def bytes_per_lane(self) -> int:
        """What one lane carries."""
        _, trainer = self.blocks[0]
        return sum(value[0].nbytes for value in trainer.state().values())

    @torch.no_grad()
    def step(self) -> None:
        """Train all lanes for one epoch and evaluate them.

        A lane whose losses or weights are not finite ends here, with this epoch as its last; the
        others go on without it.

        Raises:
            RuntimeError: where the run has finished.
        """
        if self.finished:
            raise RuntimeError(f"pack {self.pack.label} has finished")
        if self._probes_every and self.epoch % self._probes_every == 0:
            self._probe()
        living = self._ended_at.count(None)
        for block, trainer in self.blocks:
            self._record(block, *self._block_epoch(block, trainer))
        self.epoch += 1
        if self._ended_at.count(None) < living and not self.finished:
            self._compact()
        if self._probes_every and self.epoch == self.epochs:
            self._probe()

    def prune(self, places: Sequence[int]) -> None:
        """End the trials at `places` of the pack here, with what they have; the others go on without them.

        Those that have ended stay as they are.
        """
        for place in places:
            if self._ended_at[place] is None and not self.finished:
                self._ended_at[place] = self.epoch
                self._pruned[place] = True
        if not self.finished:
            self._compact()

    def results(self) -> tuple[TrialResult, ...]:
        """One result per trial, in the pack's order.

        Raises:
            RuntimeError: where the run has not finished.
        """
        if not self.finished:
            raise RuntimeError(f"pack {self.pack.label} is at epoch {self.epoch} of {self.epochs}")
        results = []
        for place, (config, ended_at) in enumerate(zip(self.pack.trials, self._ended_at, strict=True)):
            epochs = self.epoch if ended_at is None else ended_at
            updates = min(epochs * self.steps, self.updates)
            state, reason = TrialState.SUCCEEDED, None
            if ended_at is not None:
                state, reason = TrialState.DIVERGED, Reason.NON_FINITE_LOSS
                if self._pruned[place]:
                    state, reason = TrialState.PRUNED, Reason.STOPPED_EARLY
            results.append(
                TrialResult(
                    config=config,
                    state=state,
                    reason=reason,
                    epochs_completed=epochs,
                    updates=updates,
                    samples=updates * config.batch_size,
                    chance_accuracy=1 / self._classes,
                    curves={metric: tuple(values) for metric, values in self._curves[place].items()},
                    probes=tuple(self._probes[place]),
                    lanes_at_once=self.lanes_at_once,
                )
            )
        return tuple(results)

    def checkpoint(self) -> bytes:
        """All that is needed to go on from here, exactly; see `trials.engine.checkpoints`."""
        places, state = self._gather()
        header = {
            "pack": self.pack.key,
            "epoch": self.epoch,
            "places": places,
            "ended_at": self._ended_at,
            "pruned": self._pruned,
            "curves": self._curves,
            "probes": [[{"updates": p.updates, "values": p.values} for p in probes] for probes in self._probes],
        }
        return checkpoints.encode(header, {name: value.cpu().numpy() for name, value in state.items()})

    def restore(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint of the same pack, whatever its lanes at once were.

        Raises:
            checkpoints.CheckpointError: where it is damaged or of another pack.
        """
        header, arrays = checkpoints.decode(checkpoint)
        if header["pack"] != self.pack.key:
            raise checkpoints.CheckpointError(f"the checkpoint is of pack {header['pack']}, not {self.pack.key}")
        try:
            self._build(header["places"], {name: torch.from_numpy(array) for name, array in arrays.items()})
        except (KeyError, IndexError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            raise checkpoints.CheckpointError(f"the checkpoint does not fit the pack: {error!r}") from error
        self.epoch, self._ended_at, self._curves = header["epoch"], header["ended_at"], header["curves"]
        self._pruned = header["pruned"]
        self._probes = [
            [Probe(p["updates"], {k: tuple(v) for k, v in p["values"].items()}) for p in probes]
            for probes in header["probes"]
        ]

    def _build(self, places: Sequence[int], state: Mapping[str, Tensor] | None = None) -> None:
        """Lay out the trials at `places`; `state` has a row for each of them, in that order."""
        row_of = {place: row for row, place in enumerate(places)}
        self.blocks = []
        self._rooms.clear()
        for block in lay_out(self.pack, places, self.lanes_at_once):
            trainer = self._trainer(block)
            if state is not None:
                rows = torch.tensor([row_of[place] for place in block.slots])
                trainer.load({name: value[rows.to(value.device)] for name, value in state.items()})
            self.blocks.append((block, trainer))

    def _trainer(self, block: Block) -> Trainer:
        config = self.pack.config
        arguments = (
            config,
            self._lanes(block),
            self._shape,
            self._classes,
            self._train,
            self.updates,
            self.device,
            self._dtype,
        )
        if is_fusible(config) and not any(decay for decay, _ in self.pack.settings):
            return FusedTrainer(*arguments, slots=len(self.pack.settings), rooms=self._rooms)
        return GeneralTrainer(*arguments)

    def _lanes(self, block: Block) -> Lanes:
        trials = [[self.pack.trials[place] for place in group] for group in block.groups]
        return Lanes(
            tuple(group[0].seed for group in trials),
            torch.tensor([[trial.step_size for trial in group] for group in trials], dtype=torch.float64),
            torch.tensor([[trial.weight_decay for trial in group] for group in trials], dtype=torch.float64),
        )

    def _gather(self) -> tuple[list[int], dict[str, Tensor]]:
        """Places of the lanes that live, and what they carry, row by row."""
        places: list[int] = []
        parts: list[dict[str, Tensor]] = []
        for block, trainer in self.blocks:
            owners = {place: lane for place, lane in block.owners.items() if self._ended_at[place] is None}
            if owners:
                places += owners
                lanes = torch.tensor(list(owners.values()))
                parts.append({name: value[lanes.to(value.device)] for name, value in trainer.state().items()})
        return places, {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def _compact(self) -> None:
        """Drop dead lanes where that makes the blocks smaller."""
        living = [place for place, at in enumerate(self._ended_at) if at is None]
        blocks = lay_out(self.pack, living, self.lanes_at_once)
        if sum(len(block.slots) for block in blocks) < sum(len(block.slots) for block, _ in self.blocks):
            self._build(*self._gather())

    def _block_epoch(self, block: Block, trainer: Trainer) -> tuple[dict[str, list[float]], list[bool]]:
        """One epoch of one block: its lanes' metrics, and which lanes are still finite."""
        first = self.epoch * self.steps
        samples = min(self.steps, self.updates - first) * self.pack.config.batch_size
        seeds = [self.pack.trials[group[0]].seed for group in block.groups]
        count = len(self._train[1])
        orders = np.stack([np.random.default_rng([seed, self.epoch]).permutation(count)[:samples] for seed in seeds])
        train_loss = trainer.train(torch.from_numpy(orders).to(self.device), first) / samples
        (validation_loss, validation_accuracy), (test_loss, test_accuracy) = (
            trainer.evaluate(*split) for split in self._held_out
        )
        values = (train_loss, validation_loss, validation_accuracy, test_loss, test_accuracy)
        finite = torch.stack([train_loss, validation_loss, test_loss, trainer.squared_norms()]).isfinite().all(0)
        return {metric: value.tolist() for metric, value in zip(METRICS, values, strict=True)}, finite.tolist()

    def _probe(self) -> None:
        """Probe the lanes that live."""
        update = min(self.epoch * self.steps, self.updates)
        for block, trainer in self.blocks:
            values = probe(
                self._network,
                self.pack.config,
                self._lanes(block),
                trainer.state(),
                self._train,
                update,
                self.updates,
            )
            rows = {name: value.tolist() for name, value in values.items()}
            for place, lane in block.owners.items():
                if self._ended_at[place] is None:
                    found = {name: tuple(map(_finite, row[lane])) for name, row in rows.items()}
                    self._probes[place].append(Probe(update, found))

    def _record(self, block: Block, metrics: dict[str, list[float]], finite: list[bool]) -> None:
        for place, lane in block.owners.items():
            if self._ended_at[place] is not None:
                continue
            for metric, values in metrics.items():
                self._curves[place][metric].append(_finite(values[lane]))
            if not finite[lane]:
                self._ended_at[place] = self.epoch + 1


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check(pack: Pack, count: int) -> None:
    lanes = [(seed, *setting) for seed in pack.seeds for setting in pack.settings]
    if [(trial.seed, trial.weight_decay, trial.learning_rate) for trial in pack.trials] != lanes:
        raise ValueError(f"pack {pack.label} is not every seed with every setting, in order")
    if pack.config.batch_size > count:
        raise ValueError(f"batch size {pack.config.batch_size} is larger than the {count} training samples")


def _tensors(split: Split, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The split on the device; on the CPU in float32 without a copy, though shared memory may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        inputs, labels = torch.from_numpy(split.inputs), torch.from_numpy(split.labels)
    return inputs.to(device, dtype), labels.to(device)
