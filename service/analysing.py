"""The analysis of an ended study, in a process of its own, so that the API goes on answering.

One worker process, started when it is first needed and gone again after a minute of idleness.
It is spawned, not forked (the service has threads), can be killed when an analysis takes too
long, and ends by itself when the service dies.
"""

import json
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trials.ledger import Ledger, LedgerError
from trials.plan import make_plan
from trials.records import Reason, TrialState
from trials.spec import DataFacts, parse_document, parse_spec

log = logging.getLogger(__name__)

VERDICT_FILE = "analysis/verdict.json"
REPORT_FILE = "analysis/report.html"
RESULTS_FILE = "analysis/results.parquet"
"""Every planned trial of an ended study, in the plan's order: the table that was analysed."""

ATTEMPT_KEY = b"normstudy.attempt"
"""Metadata of that file: the attempt it tells of."""

_IDLE_SECONDS = 60.0


@dataclass(frozen=True)
class AnalysisTask:
    """All that a worker needs to analyse one study."""

    study_id: str
    attempt: int
    root: str  # of the study's ledger
    spec: str  # canonical JSON
    facts: Mapping[str, Any]  # fields of DataFacts
    absent: tuple[TrialState, Reason] | None  # of trials without a shard
    provenance: Mapping[str, Any]  # for the report's footer


@dataclass(frozen=True)
class AnalysisResult:
    """How an analysis ended: with a verdict per hypothesis, or with an error in one line."""

    verdict: list[dict[str, Any]] | None
    error: str | None


def analyse_study(task: AnalysisTask) -> list[dict[str, Any]]:
    """Read the ledger, analyse, and write table, verdict and report into the study's folder.

    Returns:
        `[{"hypothesis": index, "verdict": "supported" | "contradicted" | "undecided"}, …]`
    """
    from analysis import analyse, render_report  # seconds of import that only the worker spends

    ledger = Ledger(task.root)
    spec = parse_spec(parse_document(task.spec, "json"))
    plan = make_plan(spec, DataFacts(**task.facts))
    table = ledger.table(plan, absent=task.absent)
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({ATTEMPT_KEY: str(task.attempt)}), sink)
    ledger.write_file(RESULTS_FILE, sink.getvalue().to_pybytes())
    analysis = analyse(table, spec)
    verdict = analysis.to_dict()
    text = json.dumps(verdict, indent=1, ensure_ascii=False, allow_nan=False)
    report = render_report(analysis, table, spec, {**task.provenance, **_where(ledger)})
    ledger.write_file(REPORT_FILE, report.encode())
    ledger.write_file(VERDICT_FILE, text.encode())
    return [{"hypothesis": h["index"], "verdict": h["verdict"]} for h in verdict["hypotheses"]]


def software_versions() -> dict[str, str]:
    """Versions of what made a study's numbers and their analysis."""
    names = ("normstudy", "ray", "torch", "mlflow", "numpy", "scipy", "pandas", "pyarrow")
    return {name: metadata.version(name) for name in names}


class Analyser:
    """Runs one analysis at a time in a worker process. For one thread (the reconciler's).

    Args:
        timeout: seconds after which an analysis is killed.
        function: what the worker runs; importable by its name.
    """

    def __init__(self, timeout: float, function: Callable[[AnalysisTask], Any] = analyse_study):
        self._timeout, self._function = timeout, function
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None
        self._task: AnalysisTask | None = None
        self._deadline = 0.0

    @property
    def busy_with(self) -> str | None:
        """Id of the study that is being analysed."""
        return self._task.study_id if self._task else None

    def start(self, task: AnalysisTask) -> None:
        """Begin; `poll` tells the end."""
        if self._task is not None:
            raise RuntimeError("one analysis at a time")
        pipe = self._worker()
        try:
            pipe.send(task)
        except OSError:  # the idle worker left at this very moment
            self._discard()
            self._worker().send(task)
        self._task, self._deadline = task, time.monotonic() + self._timeout

    def poll(self) -> AnalysisResult | None:
        """The result once there is one; None while the analysis runs."""
        if self._task is None or self._pipe is None:
            raise RuntimeError("no analysis was started")
        try:
            if self._pipe.poll():
                verdict, error = self._pipe.recv()
                return self._ended(AnalysisResult(verdict, error))
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self._discard()
            return self._ended(AnalysisResult(None, f"the analysis process ended with status {code}"))
        if time.monotonic() > self._deadline:
            self._discard()
            return self._ended(AnalysisResult(None, f"the analysis took longer than {self._timeout:g} seconds"))
        return None

    def close(self) -> None:
        """Stop the worker, whatever it does; a study that was being analysed is analysed again later."""
        self._task = None
        self._discard()

    def _ended(self, result: AnalysisResult) -> AnalysisResult:
        self._task = None
        return result

    def _worker(self) -> Connection:
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return self._pipe
        self._discard()
        ours, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_work, args=(theirs, self._function), name="normstudy-analysis", daemon=True
        )
        self._process.start()
        theirs.close()  # so that each end sees the other's death
        self._pipe = ours
        return ours

    def _discard(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.join(5)
            self._process = None


def _work(pipe: Connection, function: Callable[[AnalysisTask], Any]) -> None:
    """The worker process: tasks in, (verdict, error) out, until the pipe is closed or idle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the service decides
    while pipe.poll(_IDLE_SECONDS):
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (function(task), None)
        except Exception as error:
            logging.basicConfig()
            log.exception("the analysis of study %s failed", task.study_id)
            answer = (None, f"{type(error).__name__}: {error}".splitlines()[0][:500])
        pipe.send(answer)


def _where(ledger: Ledger) -> dict[str, Any]:
    """What the shards say of how they were made: each distinct host, device, version, and the time spent."""
    hosts: set[str] = set()
    devices: set[str] = set()
    versions: dict[str, set[str]] = {}
    seconds = 0.0
    for key in ledger.finished():
        try:
            of_pack = ledger.provenance(key)
        except (LedgerError, OSError):  # damaged since it was listed
            continue
        hosts.add(str(of_pack.get("host")))
        devices.add(str(of_pack.get("device")))
        seconds += float(of_pack.get("seconds") or 0)
        for name, version in (of_pack.get("versions") or {}).items():
            versions.setdefault(name, set()).add(str(version))
    return {
        "hosts": sorted(hosts - {"None"}),
        "devices": sorted(devices - {"None"}),
        "trained_with": {name: ", ".join(sorted(found)) for name, found in sorted(versions.items())},
        "training_seconds": round(seconds, 3),
    }
