"""The frozen records that travel between plan, engine, ledger and analysis, and the results table.

One row of the results table is one trial. Its columns are the wire format of this product's
numbers: `analysis`, the exports and MLflow all read them, none computes them anew.
"""

import enum
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import pyarrow as pa


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


RESULTS_SCHEMA = pa.schema(
    [
        pa.field("trial_key", pa.string(), nullable=False),
        pa.field("cell_key", pa.string(), nullable=False),
        pa.field("pack_key", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("path", pa.string()),
        pa.field("train_samples", pa.int64()),
        pa.field("validation_fraction", pa.float64(), nullable=False),
        pa.field("test_fraction", pa.float64(), nullable=False),
        pa.field("split_seed", pa.int64(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("depth", pa.int64(), nullable=False),
        pa.field("width", pa.int64(), nullable=False),
        pa.field("activation", pa.string(), nullable=False),
        pa.field("normaliser", pa.string(), nullable=False),
        pa.field("optimiser", pa.string(), nullable=False),
        pa.field("epochs", pa.int64()),
        pa.field("last_batch", pa.string(), nullable=False),
        pa.field("batch_size", pa.int64(), nullable=False),
        pa.field("learning_rate", pa.float64(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("epochs_completed", pa.int64(), nullable=False),
        pa.field("updates", pa.int64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("chance_accuracy", pa.float64()),
        *(pa.field(metric, pa.float64()) for metric in METRICS),
        *(pa.field(f"{metric}_by_epoch", pa.list_(pa.float64()), nullable=False) for metric in METRICS),
        pa.field("budget_updates", pa.int64()),
        pa.field("budget_samples", pa.int64()),
        pa.field("placement", pa.string()),
        pa.field("gain", pa.bool_()),
        pa.field("channels", pa.string()),  # "16-32"
        pa.field("kernel", pa.int64()),
        pa.field("stride", pa.int64()),
        pa.field("pooling", pa.string()),
        pa.field("heads", pa.int64()),
        pa.field("patch", pa.int64()),
        pa.field("momentum", pa.float64()),
        pa.field("weight_decay", pa.float64()),
        pa.field("schedule", pa.string()),
        pa.field("schedule_final", pa.float64()),
        pa.field("schedule_every", pa.float64()),
        pa.field("schedule_factor", pa.float64()),
        pa.field("scaling", pa.string()),
        pa.field("scaling_batch_size", pa.int64()),
        pa.field("synthetic", pa.string()),
        pa.field("probe_every", pa.int64()),
        pa.field("probe_samples", pa.int64()),
        pa.field("lanes_at_once", pa.int64()),
        pa.field("probe_updates", pa.list_(pa.int64())),
        *(pa.field(f"probe_{name}", pa.list_(pa.list_(pa.float64()))) for name in PROBES),  # [probe, map]
    ]
)
"""The columns of shards, `results.parquet` and the exports, in order; from `budget_updates` on those that came
after the first release."""

CURVE_COLUMNS = tuple(f"{metric}_by_epoch" for metric in METRICS)
PROBE_COLUMNS = ("probe_updates", *(f"probe_{name}" for name in PROBES))


def conform(table: pa.Table, names: Sequence[str] = RESULTS_SCHEMA.names) -> pa.Table:
    """A results table of this release or an earlier one, with columns and types as `RESULTS_SCHEMA` has them.

    An earlier release's trials had no probes, and what is now the default of each setting that came later.

    Args:
        names: the columns that are wanted.

    Raises:
        ValueError: a column is missing that every release wrote, or one is there that none writes; or, as
            pyarrow.ArrowInvalid, a value does not fit its column.
    """
    have = set(table.column_names)
    if unknown := have.difference(names) | set(names).difference(have, _LATER_COLUMNS):
        raise ValueError(f"these columns are missing or not of a results table: {', '.join(sorted(unknown))}")
    for name in names:
        if name not in have:
            value = [] if name in PROBE_COLUMNS else _CONFIG_DEFAULTS.get(name)
            table = table.append_column(name, pa.array([value] * table.num_rows, RESULTS_SCHEMA.field(name).type))
    schema = pa.schema([RESULTS_SCHEMA.field(name) for name in names])
    return table.select(list(names)).replace_schema_metadata(None).cast(schema)


_LATER_COLUMNS = frozenset(RESULTS_SCHEMA.names[RESULTS_SCHEMA.get_field_index("budget_updates") :])
_CONFIG_DEFAULTS = {f.name: f.default for f in fields(TrialConfig) if f.default is not MISSING}


def channels_text(channels: Sequence[int] | None) -> str | None:
    """`channels` as the results table has it: "16-32"."""
    return None if channels is None else "-".join(map(str, channels))


def results_table(pack_key_of: Sequence[str], results: Sequence[TrialResult]) -> pa.Table:
    """Rows in the order given; `pack_key_of[i]` is the pack of `results[i]`."""
    rows = []
    for pack_key, result in zip(pack_key_of, results, strict=True):
        config = asdict(result.config)
        row = {
            "trial_key": result.config.key,
            "cell_key": result.config.cell_key,
            "pack_key": pack_key,
            **config,
            "channels": channels_text(result.config.channels),
            "state": str(result.state),
            "reason": str(result.reason) if result.reason else None,
            "epochs_completed": result.epochs_completed,
            "updates": result.updates,
            "samples": result.samples,
            "chance_accuracy": result.chance_accuracy,
            **{metric: result.final(metric) for metric in METRICS},
            **{f"{metric}_by_epoch": list(result.curves[metric]) for metric in METRICS},
            "lanes_at_once": result.lanes_at_once,
            "probe_updates": [probe.updates for probe in result.probes],
            **{f"probe_{name}": [list(probe.values[name]) for probe in result.probes] for name in PROBES},
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=RESULTS_SCHEMA)


MLFLOW_VIEW = "normstudy"
"""Key of the shared view of a study's experiment, which lists its trials with parameters and metrics."""


def experiment_name(study_name: str, study_id: str) -> str:
    """The name of a study's MLflow experiment; the id keeps studies of one name apart."""
    return f"{study_name} ({study_id})"


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
