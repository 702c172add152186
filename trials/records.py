"""The frozen records that travel between plan, engine, ledger and analysis, and the results table.

One row of the results table is one trial. Its columns are the wire format of this product's
numbers: `analysis`, the exports and MLflow all read them, none computes them anew.
"""

import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

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

    NON_FINITE_LOSS = "non_finite_loss"  # diverged: training loss or weights became NaN or infinite
    PACK_ERROR = "pack_error"  # failed: the pack raised; its traceback is in the driver's log
    WORKER_LOST = "worker_lost"  # lost: the pack's process or node died more often than is retried
    STUDY_CANCELLED = "study_cancelled"  # cancelled: the study ended before this trial ran
    STUDY_FAILED = "study_failed"  # lost: the study's driver failed before this trial ran


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """All that determines one trial's numbers. `key` is a hash of the content."""

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
    epochs: int
    last_batch: str
    batch_size: int
    learning_rate: float
    seed: int

    @property
    def key(self) -> str:
        """16 hex digits of the SHA-256 of the content: the trial's name everywhere."""
        return _digest(_encode(self))

    @property
    def cell_key(self) -> str:
        """The key of the trial's cell: the same content without the seed."""
        content = asdict(self)
        del content["seed"]
        return _digest(json.dumps(content, sort_keys=True, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class Pack:
    """Trials of one shape, normaliser and batch size, trained together by one actor.

    `trials` is ordered by seed, then learning rate, and rectangular: every seed comes with
    the same learning rates, so that lanes stack as [seeds, learning rates].
    """

    key: str
    label: str  # short and unique within the study, for people: "affine_like-B8"
    trials: tuple[TrialConfig, ...]

    @property
    def config(self) -> TrialConfig:
        """The first trial's config; all but its `learning_rate` and `seed` hold for the whole pack."""
        return self.trials[0]

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(t.seed for t in self.trials))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(t.learning_rate for t in self.trials))


METRICS = ("train_loss", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy")


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How one trial ended, with its metrics after each completed epoch.

    `curves[metric]` has one value per completed epoch; a value that is not finite is None.
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
        pa.field("epochs", pa.int64(), nullable=False),
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
    ]
)
"""The columns of shards, `results.parquet` and the exports, in order."""

CURVE_COLUMNS = tuple(f"{metric}_by_epoch" for metric in METRICS)

_CONFIG_FIELDS = tuple(f.name for f in fields(TrialConfig))


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
            "state": str(result.state),
            "reason": str(result.reason) if result.reason else None,
            "epochs_completed": result.epochs_completed,
            "updates": result.updates,
            "samples": result.samples,
            "chance_accuracy": result.chance_accuracy,
            **{metric: result.final(metric) for metric in METRICS},
            **{f"{metric}_by_epoch": list(result.curves[metric]) for metric in METRICS},
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=RESULTS_SCHEMA)


MLFLOW_VIEW = "normstudy"
"""Key of the shared view of a study's experiment, which lists its trials with parameters and metrics."""


def experiment_name(study_name: str, study_id: str) -> str:
    """The name of a study's MLflow experiment; the id keeps studies of one name apart."""
    return f"{study_name} ({study_id})"


def _encode(config: TrialConfig) -> str:
    return json.dumps({name: getattr(config, name) for name in _CONFIG_FIELDS}, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
