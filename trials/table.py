"""The results table: one row is one trial.

Its columns are the wire format of this product's numbers: `analysis`, the exports and MLflow all
read them, none computes them anew.
"""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields

import pyarrow as pa

from trials.records import METRICS, PROBES, TrialConfig, TrialResult, channels_text

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
