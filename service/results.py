"""Studies' trials and progress, read from the ledger, with as little reading as can be.

A plan is made once per study and kept; a shard's states are read once; a folder is listed at
most every half second, however many clients poll.
"""

import io
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from service.analysing import ATTEMPT_KEY, RESULTS_FILE
from service.store import Study, StudyState
from trials.ledger import Ledger, LedgerError
from trials.plan import Plan, estimate, make_plan
from trials.records import Pack, Reason, TrialResult, TrialState
from trials.spec import DataFacts, StudySpec, parse_document, parse_spec
from trials.table import CURVE_COLUMNS, PROBE_COLUMNS, RESULTS_SCHEMA, conform, results_table

SCALAR_COLUMNS = tuple(name for name in RESULTS_SCHEMA.names if name not in (*CURVE_COLUMNS, *PROBE_COLUMNS))
"""What a listing and the CSV export show: one value per trial."""

STORAGE_ERRORS = (OSError, LedgerError, pa.ArrowException)
"""What reading and writing a study's folder may raise."""

_FRESH_SECONDS = 0.5

_ABSENT = {
    StudyState.CANCELLED: (TrialState.CANCELLED, Reason.STUDY_CANCELLED),
    StudyState.FAILED: (TrialState.LOST, Reason.STUDY_FAILED),
    StudyState.COMPLETED: (TrialState.LOST, Reason.STUDY_FAILED),  # never shown: `_check_counts` refuses first
}


def absent_as(outcome: StudyState) -> tuple[TrialState, Reason]:
    """State and reason of the trials that a study which ended so has never run."""
    return _ABSENT[outcome]


@dataclass(frozen=True)
class Finished:
    """A finished pack: how its trials ended, and when its shard was written (Unix time)."""

    states: tuple[str, ...]
    written_at: float


class StudyResults:
    """One study's plan and what its ledger says of it. Safe to use from several threads."""

    def __init__(self, study: Study, root: str):
        try:
            self.spec: StudySpec = parse_spec(parse_document(study.spec, "json"))
            self.facts = DataFacts(**study.facts)
        except (ValueError, TypeError) as error:  # SpecError and DocumentError are of the first kind
            raise LedgerError(f"the stored spec of study {study.id} cannot be understood: {error}") from error
        self.ledger = Ledger(root)
        self._lock = threading.Lock()
        self._finished: dict[str, Finished] = {}
        self._tracked: set[str] = set()
        self._read_at = -math.inf
        self._settled: tuple[object, pa.Table] | None = None

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.spec, self.facts)

    @cached_property
    def _work(self) -> dict[str, float]:
        """Estimated core seconds of each pack: packs differ too much to be counted alike."""
        return {pack.key: max(1e-6, estimate([pack], self.facts).core_seconds) for pack in self.plan.packs}

    @cached_property
    def _first_rows(self) -> dict[str, int]:
        """Place of each pack's first trial in the plan."""
        rows, row = {}, 0
        for pack in self.plan.packs:
            rows[pack.key] = row
            row += len(pack.trials)
        return rows

    @cached_property
    def _places(self) -> dict[str, tuple[Pack, int]]:
        """Where each trial is: its pack, and its row there."""
        return {trial.key: (pack, row) for pack in self.plan.packs for row, trial in enumerate(pack.trials)}

    def refresh(self, max_age: float = _FRESH_SECONDS) -> None:
        """Look at the ledger again, unless that was done within `max_age` seconds."""
        with self._lock:
            if time.monotonic() - self._read_at < max_age:
                return
            written = self.ledger.finished_at()
            finished = {}
            for pack in self.plan.packs:
                if pack.key not in written:
                    continue
                known = self._finished.get(pack.key)
                if known is None or known.written_at != written[pack.key]:
                    states = tuple(self.ledger.shard(pack.key).column("state").to_pylist())
                    known = Finished(states, written[pack.key])
                finished[pack.key] = known
            self._tracked = self.ledger.tracked()
            self._finished = finished
            self._read_at = time.monotonic()

    @property
    def missing(self) -> int:
        """Packs of the plan without a shard, as of the last `refresh`."""
        return len(self.plan.packs) - len(self._finished)

    @property
    def any_finished(self) -> bool:
        return bool(self._finished)

    @property
    def is_tracked(self) -> bool:
        """Whether MLflow has every finished pack, as of the last `refresh`."""
        return self._finished.keys() <= self._tracked

    def to_run(self) -> list[Pack]:
        """What another attempt would have to run: packs without a readable shard, and lost ones.

        Raises:
            LedgerError, OSError, pyarrow.ArrowException
        """
        return self.ledger.to_run(self.plan)

    def progress(self, study: Study, now: datetime | None = None) -> dict[str, Any]:
        """Counts, and how fast the present attempt goes.

        The rate is that of the shards written since the attempt began; the time left takes into
        account that packs differ in cost (those of small batches come first and take longest).
        """
        finished = self._finished
        states = Counter(state for pack in finished.values() for state in pack.states)
        done = sum(states.values())
        rate, seconds_left = None, None
        if study.state == StudyState.RUNNING and study.attempt_started_at is not None:
            began = study.attempt_started_at.timestamp()
            fresh = {key: pack for key, pack in finished.items() if pack.written_at >= began}
            elapsed = max((pack.written_at for pack in fresh.values()), default=began) - began
            if fresh and elapsed > 0:
                rate = sum(len(pack.states) for pack in fresh.values()) / elapsed
                left = sum(work for key, work in self._work.items() if key not in finished)
                expected = left * elapsed / sum(self._work[key] for key in fresh)
                since = (now or datetime.now(UTC)).timestamp() - began - elapsed
                seconds_left = max(0.0, expected - max(0.0, since))
        return {
            "trials_total": study.trials,
            "trials_done": done,
            "packs_total": study.packs,
            "packs_done": len(finished),
            "states": {str(state): states[state] for state in TrialState if states[state]},
            "trials_per_second": None if rate is None else round(rate, 4),
            "seconds_left": None if seconds_left is None else round(seconds_left, 1),
        }

    # -- rows ------------------------------------------------------------------------------------

    def rows(
        self, study: Study, limit: int, *, start: int = 0, state: str | None = None, normaliser: str | None = None
    ) -> list[tuple[int, dict[str, Any]]]:
        """Up to `limit` trials as (place in the plan, row without curves), from place `start` on.

        While the study runs, the trials that have ended; afterwards every planned trial.
        """
        if StudyState(study.state).has_ended:
            return self._settled_rows(study, limit, start, state, normaliser)
        return self._running_rows(limit, start, state, normaliser)

    def row(self, study: Study, trial_key: str) -> dict[str, Any] | None:
        """One trial with its curves; None where there is no such trial, or not yet."""
        if trial_key not in self._places:
            return None
        pack, row = self._places[trial_key]
        if StudyState(study.state).has_ended and (file := self._trials_file(study)) is not None:
            with readable(study):
                return plain(conform(file.read().slice(self._first_rows[pack.key] + row, 1)).to_pylist()[0])
        self.refresh()
        if StudyState(study.state).has_ended:
            self._check_counts(study)
        if pack.key in self._finished:
            return plain(self.ledger.shard(pack.key).slice(row, 1).to_pylist()[0])
        if not StudyState(study.state).has_ended:
            return None
        gone = TrialResult.absent(pack.trials[row], *absent_as(StudyState(study.state)))
        return plain(results_table([pack.key], [gone]).to_pylist()[0])

    def _running_rows(
        self, limit: int, start: int, state: str | None, normaliser: str | None
    ) -> list[tuple[int, dict[str, Any]]]:
        self.refresh()
        found: list[tuple[int, dict[str, Any]]] = []
        finished = self._finished
        for pack in self.plan.packs:
            first, ended = self._first_rows[pack.key], finished.get(pack.key)
            if ended is None or first + len(pack.trials) <= start:
                continue
            if normaliser is not None and pack.config.normaliser != normaliser:
                continue
            wanted = [
                row for row, of_row in enumerate(ended.states) if first + row >= start and state in (None, of_row)
            ]
            if wanted:
                table = self.ledger.shard(pack.key).select(SCALAR_COLUMNS).take(wanted)
                found += zip((first + row for row in wanted), map(plain, table.to_pylist()), strict=True)
            if len(found) >= limit:
                return found[:limit]
        return found

    def _settled_rows(
        self, study: Study, limit: int, start: int, state: str | None, normaliser: str | None
    ) -> list[tuple[int, dict[str, Any]]]:
        table = self._settled_table(study)
        table = table.append_column("_place", pa.array(range(table.num_rows), pa.int64())).slice(start)
        if state is not None:
            table = table.filter(pc.field("state") == state)
        if normaliser is not None:
            table = table.filter(pc.field("normaliser") == normaliser)
        rows = table.slice(0, limit).to_pylist()
        return [(row.pop("_place"), plain(row)) for row in rows]

    def _settled_table(self, study: Study) -> pa.Table:
        """Every planned trial of an ended study, without curves; kept while the study stays as it is."""
        version = (study.attempt, study.state, study.ended_at)
        with self._lock:
            if self._settled is not None and self._settled[0] == version:
                return self._settled[1]
        # Without the lock: to look at the ledger takes it too.
        file = self._trials_file(study)
        if file is None:
            self.refresh(max_age=0)
            self._check_counts(study)
            table = self.ledger.table(self.plan, absent=absent_as(StudyState(study.state))).select(SCALAR_COLUMNS)
        else:
            with readable(study):
                scalars = [name for name in SCALAR_COLUMNS if name in file.schema_arrow.names]
                table = conform(file.read(columns=scalars), SCALAR_COLUMNS)
        with self._lock:
            self._settled = (version, table.combine_chunks())
            return self._settled[1]

    def _trials_file(self, study: Study) -> pq.ParquetFile | None:
        """What the analysis of this attempt wrote; None where it did not come so far.

        Raises:
            LedgerError: the file is there and damaged.
        """
        if not self.ledger.has_file(RESULTS_FILE):
            return None
        with readable(study):
            file = pq.ParquetFile(pa.BufferReader(self.ledger.read_file(RESULTS_FILE)))
            if (file.schema_arrow.metadata or {}).get(ATTEMPT_KEY) != str(study.attempt).encode():
                return None
            conform(file.schema_arrow.empty_table())
            if file.metadata.num_rows != self.plan.trials:
                raise pa.ArrowInvalid("it is not a table of the study's trials")
            return file

    def _check_counts(self, study: Study) -> None:
        """Shards stand in for the table that is not there, if they still say what was counted at the end.

        Raises:
            LedgerError
        """
        kept = study.progress
        if kept is None:
            return
        states = Counter(state for pack in self._finished.values() for state in pack.states)
        if dict(states) == kept["states"]:
            return
        raise LedgerError(
            f"{RESULTS_FILE} of study {study.id} is missing, and its shards no longer hold what was counted when it "
            f"ended ({len(self._finished)} readable of {kept['packs_done']}); "
            "restore the study's folder from a copy, or resume the study to run what is missing"
        )

    # -- exports -----------------------------------------------------------------------------------

    def csv(self, study: Study, sink: Any) -> None:
        """The scalar columns as CSV, into a file object."""
        sink.write(_csv(RESULTS_SCHEMA.empty_table().select(SCALAR_COLUMNS), header=True))
        for table in self._tables(study):
            sink.write(_csv(table.select(SCALAR_COLUMNS), header=False))

    def parquet(self, study: Study, sink: Any) -> None:
        """All columns as Parquet, into a file object."""
        with pq.ParquetWriter(sink, RESULTS_SCHEMA) as writer:
            for table in self._tables(study):
                writer.write_table(table)

    def _tables(self, study: Study) -> Iterator[pa.Table]:
        """Trials in the plan's order, in parts: memory does not grow with the study."""
        if StudyState(study.state).has_ended and (file := self._trials_file(study)) is not None:
            with readable(study):
                for batch in file.iter_batches(batch_size=1000):
                    yield conform(pa.Table.from_batches([batch]))
            return
        self.refresh()
        if StudyState(study.state).has_ended:
            self._check_counts(study)
        finished = self._finished
        for pack in self.plan.packs:
            if pack.key in finished:
                yield self.ledger.shard(pack.key)
            elif StudyState(study.state).has_ended:
                absent = absent_as(StudyState(study.state))
                gone = [TrialResult.absent(trial, *absent) for trial in pack.trials]
                yield results_table([pack.key] * len(gone), gone)


@contextmanager
def readable(study: Study) -> Iterator[None]:
    """Damage to the analysed table leaves as `LedgerError`, with what to do about it."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise LedgerError(
            f"{RESULTS_FILE} of study {study.id} is damaged ({error}); restore it from a copy, or remove it: "
            "the rows are then read from the study's shards"
        ) from error


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as strict JSON can have it: a number that is not finite becomes null."""
    return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _csv(table: pa.Table, *, header: bool) -> bytes:
    sink = io.BytesIO()
    pa_csv.write_csv(table, sink, pa_csv.WriteOptions(include_header=header))
    return sink.getvalue()
