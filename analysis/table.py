"""Results table → the outcome of every trial on the study's grid, and what was left out and why.

Succeeded trials count with the test accuracy after their last epoch. Diverged trials are data:
they count at chance accuracy, or are left out, as the treatment says. Trials that failed, were
lost, cancelled or pruned have no outcome; each is counted with its reason.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from analysis.result import Attrition, Exclusion
from trials.records import Reason, TrialState, channels_text
from trials.spec import StudySpec

Treatment = Literal["chance", "excluded"]
"""Of diverged trials: counted at chance accuracy, or left out."""

_FIRST_AXES = ("learning_rate", "width", "depth", "activation")
_LATER_AXES = (
    "placement",
    "gain",
    "channels",
    "kernel",
    "stride",
    "pooling",
    "optimiser",
    "weight_decay",
)
"""Axes that tables of the first release have no column of."""

STRATUM_AXES = (*_FIRST_AXES, *_LATER_AXES)
_COLUMNS = (*_FIRST_AXES, "trial_key", "normaliser", "batch_size", "seed", "state", "reason")
_NUMBERS = ("chance_accuracy", "test_accuracy")
_PROBES = ("probe_updates", "probe_input_norm_mean", "probe_input_norm_sd", "probe_input_directions")

_WHY = {
    Reason.PACK_ERROR: "the pack raised an error; its traceback is in the driver's log",
    Reason.WORKER_LOST: "the pack's process or node died more often than is retried",
    Reason.STUDY_CANCELLED: "the study was cancelled before they ran",
    Reason.STUDY_FAILED: "the study's driver failed before they ran",
}


class AnalysisError(ValueError):
    """A table that is not a results table of the study."""


class Stratum(NamedTuple):
    """One combination of every axis but batch size, seed and normaliser. None: the table has no level."""

    learning_rate: float | None
    width: int | None
    depth: int | None
    activation: str | None
    placement: str | None
    gain: bool | None
    channels: str | None  # "16-32", as are the next three of a cnn only
    kernel: int | None
    stride: int | None
    pooling: str | None
    optimiser: str | None
    weight_decay: float | None


@dataclass(frozen=True)
class Outcomes:
    """The study's grid, `[arm, stratum, seed, level]`, with NaN where a trial has no outcome.

    `accuracy` and `validation` hold the test and validation accuracy of succeeded trials, `at_chance` the
    chance accuracy of diverged ones.
    """

    arms: tuple[str, ...]
    strata: tuple[Stratum, ...]
    seeds: tuple[int, ...]
    levels: tuple[int, ...]  # batch sizes, ascending
    accuracy: np.ndarray
    validation: np.ndarray
    at_chance: np.ndarray
    planned: int
    by_state: dict[str, int]
    chance_accuracy: float | None
    exclusions: tuple[Exclusion, ...]
    attrition: tuple[Attrition, ...]

    @property
    def diverged(self) -> int:
        return int(np.isfinite(self.at_chance).sum())

    @property
    def by_rate(self) -> dict[float | None, np.ndarray]:
        """Of each learning rate, ascending (None last), which strata have it: `[stratum]`."""
        rates = dict.fromkeys(s.learning_rate for s in self.strata)
        return {rate: np.array([s.learning_rate == rate for s in self.strata]) for rate in rates}

    def under(self, treatment: Treatment) -> np.ndarray:
        """Outcomes `[arm, stratum, seed, level]` under a treatment of diverged trials."""
        return self._under(self.accuracy, treatment)

    def validation_under(self, treatment: Treatment) -> np.ndarray:
        """Validation accuracies, as `under`: a diverged trial is at chance there too."""
        return self._under(self.validation, treatment)

    def _under(self, values: np.ndarray, treatment: Treatment) -> np.ndarray:
        if treatment == "excluded":
            return values.copy()
        return np.where(np.isfinite(self.at_chance), self.at_chance, values)


def read_outcomes(table: pa.Table, spec: StudySpec) -> Outcomes:
    """Lay the rows, in any order, on the spec's grid.

    Raises:
        AnalysisError: where a column is missing, a state is unknown, or a trial has two rows.
    """
    rows = list(_rows(table, spec))
    by_state = {str(state): 0 for state in TrialState}
    for row in rows:
        if row["state"] not in by_state:
            raise AnalysisError(f"unknown trial state {row['state']!r} (trial {row['trial_key']})")
        by_state[row["state"]] += 1
    chance = _common_chance(rows)
    arms, seeds, levels = tuple(spec.space.normaliser), tuple(spec.seed_list), tuple(sorted(spec.space.batch_size))
    axes = _axes(spec)
    planned_rows = [row for row in rows if _is_planned(row, spec, axes)]
    strata = tuple(sorted({_stratum(row) for row in planned_rows}, key=_none_last))
    shape = (len(arms), len(strata), len(seeds), len(levels))
    accuracy, validation, at_chance = (np.full(shape, np.nan) for _ in range(3))
    places = [{value: i for i, value in enumerate(axis)} for axis in (arms, strata, seeds, levels)]
    seen: set[tuple[int, ...]] = set()
    left_out: Counter[tuple[str, str]] = Counter()
    for row in planned_rows:
        key = (row["normaliser"], _stratum(row), row["seed"], row["batch_size"])
        place = tuple(of[value] for of, value in zip(places, key, strict=True))
        if place in seen:
            raise AnalysisError(f"trial {row['trial_key']} has two rows in the results table")
        seen.add(place)
        if row["state"] == TrialState.SUCCEEDED and row["test_accuracy"] is not None:
            accuracy[place] = row["test_accuracy"]
            if row["validation_accuracy"] is not None:
                validation[place] = row["validation_accuracy"]
        elif row["state"] == TrialState.DIVERGED and (at := row["chance_accuracy"] or chance) is not None:
            at_chance[place] = at
        else:
            left_out[_why_left_out(row)] += 1
    planned = _planned(spec)
    exclusions = [Exclusion(what, count, why) for (what, why), count in sorted(left_out.items())]
    if len(rows) > len(planned_rows):
        why = "their levels or seeds are not in this study's spec; left out of every estimate"
        exclusions.append(Exclusion("rows of other trials", len(rows) - len(planned_rows), why))
    if planned > len(planned_rows):
        why = "planned, but the results table has no row for them"
        exclusions.append(Exclusion("trials without a row", planned - len(planned_rows), why))
    attrition = _attrition(accuracy, at_chance, arms, levels, planned // (len(arms) * len(levels)))
    return Outcomes(
        arms,
        strata,
        seeds,
        levels,
        accuracy,
        validation,
        at_chance,
        planned,
        by_state,
        chance,
        tuple(exclusions),
        attrition,
    )


class FirstProbe(NamedTuple):
    """What the first normaliser made of its inputs before the first update, in one trial."""

    norm_mean: float  # mean over samples of the length of a normalised input
    norm_sd: float  # its standard deviation
    directions: float  # participation ratio of its second moments: 1 on a line, n in all directions


def first_probes(table: pa.Table, spec: StudySpec) -> dict[str, list[FirstProbe]]:
    """Per arm, the first map's probe before the first update of each trial that has one, in the table's order."""
    found: dict[str, list[FirstProbe]] = {arm: [] for arm in spec.space.normaliser}
    if any(name not in table.column_names for name in _PROBES):
        return found
    axes = _axes(spec)
    probes = zip(*(table.column(name).to_pylist() for name in _PROBES), strict=True)
    for row, (updates, *columns) in zip(_rows(table, spec), probes, strict=True):
        if not _is_planned(row, spec, axes) or not updates or updates[0] != 0:
            continue
        if row["placement"] == "post":  # its maps take inputs as they come; nothing is normalised before them
            continue
        values = [_finite(column[0][0]) for column in columns if column and column[0]]
        if len(values) == len(columns) and None not in values:
            found[row["normaliser"]].append(FirstProbe(*values))
    return found


def _rows(table: pa.Table, spec: StudySpec) -> Iterator[dict[str, Any]]:
    missing = [name for name in (*_COLUMNS, *_NUMBERS) if name not in table.column_names]
    absent = {name: levels for name, levels in _axes(spec).items() if name not in table.column_names}
    missing += [name for name, levels in absent.items() if name not in missing and len(levels) > 1]
    if missing:
        raise AnalysisError(f"not a results table: it has no column {', '.join(missing)}")
    there = [n for n in (*_COLUMNS, *_LATER_AXES, *_NUMBERS, "validation_accuracy") if n in table.column_names]
    columns = table.select(there).to_pydict()
    given = {"validation_accuracy": None, **{name: levels[0] for name, levels in absent.items()}}
    for values in zip(*columns.values(), strict=True):
        yield given | {name: _finite(value) for name, value in zip(columns, values, strict=True)}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stratum(row: dict[str, Any]) -> Stratum:
    return Stratum(*(row[axis] for axis in STRATUM_AXES))


def _none_last(stratum: Stratum) -> tuple[Any, ...]:
    return tuple((value is None, 0 if value is None else value) for value in stratum)


def _axes(spec: StudySpec) -> dict[str, list[Any]]:
    """Levels of each stratum axis, as the results table writes them."""
    axes = spec.axes()
    if spec.model.kind == "cnn":  # its depth and width follow from its channels
        channels = axes["channels"]
        axes["depth"] = sorted({len(of) for of in channels})
        axes["width"] = sorted({max(of) for of in channels})
        axes["channels"] = [channels_text(of) for of in channels]
    else:
        axes |= {key: [None] for key in ("channels", "kernel", "stride", "pooling")}
    return {name: axes[name] for name in STRATUM_AXES}


def _planned(spec: StudySpec) -> int:
    return math.prod(len(levels) for levels in spec.axes().values()) * len(spec.seed_list)


def _is_planned(row: dict[str, Any], spec: StudySpec, axes: dict[str, list[Any]]) -> bool:
    """Whether the row is on the spec's grid; a stratum axis without a level (null) is a level of its own."""
    on_grid = (
        row["normaliser"] in spec.space.normaliser
        and row["batch_size"] in spec.space.batch_size
        and row["seed"] in spec.seed_list
    )
    return on_grid and all(row[axis] is None or row[axis] in levels for axis, levels in axes.items())


def _common_chance(rows: list[dict[str, Any]]) -> float | None:
    known = Counter(row["chance_accuracy"] for row in rows if row["chance_accuracy"] is not None)
    return known.most_common(1)[0][0] if known else None


def _why_left_out(row: dict[str, Any]) -> tuple[str, str]:
    if row["state"] == TrialState.SUCCEEDED:
        return "succeeded trials", "left out: no test accuracy was recorded"
    if row["state"] == TrialState.DIVERGED:
        return "diverged trials", "left out: the chance accuracy they would count at is not recorded"
    reason = row["reason"]
    why = next((text for known, text in _WHY.items() if known == reason), reason or "no reason was recorded")
    return f"{row['state']} trials", f"no outcome: {why}"


def _attrition(
    accuracy: np.ndarray, at_chance: np.ndarray, arms: tuple[str, ...], levels: tuple[int, ...], planned: int
) -> tuple[Attrition, ...]:
    succeeded, diverged = (np.isfinite(a).sum(axis=(1, 2)) for a in (accuracy, at_chance))
    return tuple(
        Attrition(arm, level, planned, int(diverged[a, b]), int(max(0, planned - succeeded[a, b] - diverged[a, b])))
        for a, arm in enumerate(arms)
        for b, level in enumerate(levels)
    )
