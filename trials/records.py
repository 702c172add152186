"""The frozen records that travel between plan, engine, ledger and analysis. Standard library only.

`trials.table` lays results out as rows.
"""

import enum
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any


class TrialState(enum.StrEnum):
    """How a planned trial ended. Every planned trial ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    PRUNED = "pruned"
    DIVERGED = "diverged"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"


class Reason(enum.StrEnum):
    """Why a trial did not succeed."""

    NON_FINITE_LOSS = "non_finite_loss"  # diverged: a loss or the weights became NaN or infinite
    STOPPED_EARLY = "stopped_early"  # pruned: ended before its budget was spent, on purpose
    PACK_ERROR = "pack_error"  # failed: the pack raised; its traceback is in the shard's metadata
    WORKER_LOST = "worker_lost"  # lost: the pack's process or node died more often than is retried
    STUDY_CANCELLED = "study_cancelled"  # cancelled: the study ended before this trial ran
    STUDY_FAILED = "study_failed"  # lost: the study's driver failed before this trial ran


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """All that determines one trial's numbers. `key` is a hash of the content.

    Fields with a default came after the first release; at their default they are left out of the
    hash, so that the trials of earlier documents keep their keys.
    """

    dataset: str
    path: str | None
    train_samples: int | None
    validation_fraction: float
    test_fraction: float
    split_seed: int
    model: str
    depth: int
    width: int
    activation: str
    normaliser: str
    optimiser: str
    epochs: int | None  # the budget is exactly one of epochs, budget_updates, budget_samples
    last_batch: str
    batch_size: int
    learning_rate: float  # as listed in the study; see `step_size`
    seed: int
    budget_updates: int | None = None
    budget_samples: int | None = None
    placement: str = "pre"
    gain: bool = False
    channels: tuple[int, ...] | None = None  # of a cnn, as are the next three
    kernel: int | None = None
    stride: int | None = None
    pooling: str | None = None
    heads: int | None = None  # of an attention model, as is the next
    patch: int | None = None
    momentum: float | None = None  # where the optimiser is `momentum`
    weight_decay: float = 0.0
    schedule: str = "constant"
    schedule_final: float | None = None  # of `cosine`
    schedule_every: float | None = None  # of `step`, as is the next
    schedule_factor: float | None = None
    scaling: str = "none"
    scaling_batch_size: int | None = None  # None where the scaling is `none`
    synthetic: str | None = None  # what the synthetic data set draws, as canonical JSON
    probe_every: int | None = None  # None: no probes
    probe_samples: int | None = None

    @property
    def key(self) -> str:
        """16 hex digits of the SHA-256 of the content: the trial's name everywhere."""
        return _digest(self._content())

    @property
    def cell_key(self) -> str:
        """The key of the trial's cell: the same content without the seed."""
        content = self._content()
        del content["seed"]
        return _digest(content)

    @property
    def step_size(self) -> float:
        """The learning rate at this batch size: `learning_rate`, scaled as the study asks."""
        if self.scaling == "none" or self.scaling_batch_size is None:
            return self.learning_rate
        ratio = self.batch_size / self.scaling_batch_size
        return self.learning_rate * (ratio if self.scaling == "linear" else math.sqrt(ratio))

    def updates(self, train_samples: int) -> int:
        """Optimiser steps of the whole budget on a training split of `train_samples`."""
        if self.budget_updates is not None:
            return self.budget_updates
        if self.budget_samples is not None:
            return self.budget_samples // self.batch_size
        return (self.epochs or 0) * (train_samples // self.batch_size)

    def _content(self) -> dict[str, Any]:
        """The content that is hashed."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default or f.default is MISSING}


@dataclass(frozen=True, slots=True)
class Pack:
    """Trials of one shape, normaliser, batch size and optimiser, trained together by one actor.

    `trials` is ordered by seed, then weight decay, then learning rate, and rectangular: every seed
    comes with the same settings (weight decay, learning rate), so that lanes stack as [seeds, settings].
    """

    key: str
    label: str  # short and unique within the study, for people: "affine_like-B8"
    trials: tuple[TrialConfig, ...]

    @property
    def config(self) -> TrialConfig:
        """The first trial's config; all but its `learning_rate`, `weight_decay` and `seed` hold for the whole pack."""
        return self.trials[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(t.seed for t in self.trials))

    @property
    def settings(self) -> tuple[tuple[float, float], ...]:
        """(weight decay, learning rate) of each lane of a seed."""
        return tuple(dict.fromkeys((t.weight_decay, t.learning_rate) for t in self.trials))


METRICS = ("train_loss", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy")


PROBES = (
    "divergence_mean",
    "divergence_sd",
    "alignment",
    "update_gain",
    "interference",
    "input_norm_mean",
    "input_norm_sd",
    "input_directions",
)
"""What a probe measures of each affine map (`trials.engine.probes`), one value per map from the first to the last:

    divergence_mean, divergence_sd    mean and standard deviation over samples of ‖x‖² + 1, x the map's input
    alignment       cosine between the change of the map's outputs in the optimiser's next step and the ideal, −g
    update_gain     length of that change along −g, in units of step size × ‖g‖
    interference    share of the change's energy that comes from other samples of the batch
    input_norm_mean, input_norm_sd    the same for ‖u‖, u what the normaliser makes of x
    input_directions                  participation ratio of u's second moments: 1 on a line, n in all directions
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a trial: `values[name][map]`, None where a value is not finite or has no meaning."""

    updates: int  # optimiser steps taken before the probe
    values: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How one trial ended, with its metrics after each completed epoch.

    An epoch is a pass over the training split; where the budget is in updates or samples the last
    one may be part of a pass. `curves[metric]` has one value per completed epoch; a value that is not finite is None.
    `train_loss` is the mean over the epoch's batches as they were trained on; the other
    metrics are over the whole split after the epoch. Losses are cross-entropies in nats,
    accuracies are shares in [0, 1].
    """

    config: TrialConfig
    state: TrialState
    reason: Reason | None
    epochs_completed: int
    updates: int  # optimiser steps taken
    samples: int  # training samples seen
    chance_accuracy: float | None  # accuracy of a uniform guess, 1 / classes; None where the trial never ran
    curves: dict[str, tuple[float | None, ...]]
    probes: tuple[Probe, ...] = ()
    lanes_at_once: int | None = None  # how many trials of the pack trained together; None where the trial never ran

    def final(self, metric: str) -> float | None:
        """The metric after the last completed epoch; None before the first and where not finite."""
        curve = self.curves[metric]
        return curve[-1] if curve else None

    @classmethod
    def absent(cls, config: TrialConfig, state: TrialState, reason: Reason) -> "TrialResult":
        """The record of a trial that was planned and has no numbers."""
        empty: dict[str, tuple[float | None, ...]] = dict.fromkeys(METRICS, ())
        return cls(config, state, reason, 0, 0, 0, None, empty)


def channels_text(channels: Sequence[int] | None) -> str | None:
    """`channels` as the results table has it: "16-32"."""
    return None if channels is None else "-".join(map(str, channels))


MLFLOW_VIEW = "normstudy"
"""Key of the shared view of a study's experiment, which lists its trials with parameters and metrics."""


def experiment_name(study_name: str, study_id: str) -> str:
    """The name of a study's MLflow experiment; the id keeps studies of one name apart."""
    return f"{study_name} ({study_id})"


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
