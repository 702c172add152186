"""Studies whose trials were made up, and analyses that end as a test wants."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from service.analysing import ATTEMPT_KEY, RESULTS_FILE, Analyser, AnalysisTask
from service.app import make_services
from service.services import Services
from service.settings import Settings
from service.store import Store, Study
from service.submission import Sized, new_study
from trials.ledger import Ledger
from trials.plan import Plan, make_plan
from trials.records import METRICS, Pack, TrialConfig, TrialResult, TrialState
from trials.spec import DataFacts, StudySpec, facts_for, parse_document, parse_spec

PROBLEM_KEYS = {"type", "title", "status", "detail", "instance", "errors"}


def assert_problem(response: httpx.Response) -> None:
    """An error has the one shape; anything else may pass. Hooked into every client of the suite."""
    if response.status_code < 400:
        return
    response.read()
    assert response.headers["content-type"] == "application/problem+json"
    if response.request.method == "HEAD":
        return
    body = response.json()
    assert body.keys() == PROBLEM_KEYS
    assert body["status"] == response.status_code
    assert body["instance"] == response.request.url.path
    assert body["type"].startswith("urn:normstudy:problem:")
    assert body["title"]
    assert body["detail"]
    assert all(fault.keys() == {"pointer", "detail"} for fault in body["errors"])
    assert "Traceback" not in response.text


def settings_for(folder: Path, **changes: Any) -> Settings:
    values = {
        "data_dir": folder,
        "port": 0,
        "ray_dashboard_url": "http://127.0.0.1:9",  # the discard port: nothing answers
        "mlflow_url": "http://127.0.0.1:9",
        "poll_seconds": 0.05,
    }
    return Settings(**(values | changes))


@contextmanager
def services_for(settings: Settings, analyser: Analyser | None = None) -> Iterator[Services]:
    """The service's parts without the reconciler's thread: the test says when it looks."""
    parts = make_services(settings, analyser or Analyser(60, quick_verdict))
    try:
        yield parts
    finally:
        parts.reconciler.stop()
        parts.cluster.close()
        parts.store.close()


def study_from(spec: StudySpec) -> Study:
    facts = facts_for(spec.data, [])
    return new_study(spec, Sized(facts, make_plan(spec, facts)))


def add_study(store: Store, spec: StudySpec) -> Study:
    return store.create(study_from(spec))[0]


def plan_of(spec: StudySpec) -> Plan:
    return make_plan(spec, facts_for(spec.data, []))


def result_of(config: TrialConfig, state: TrialState = TrialState.SUCCEEDED) -> TrialResult:
    """A trial whose accuracy falls as its batch grows."""
    accuracy = round(0.9 - 0.0005 * config.batch_size + 0.001 * config.seed, 6)
    curves: dict[str, tuple[float | None, ...]] = {
        metric: (0.5, accuracy if "accuracy" in metric else 0.4) for metric in METRICS
    }
    return TrialResult(config, state, None, 2, 20, 20 * config.batch_size, 0.1, curves)


def finish_packs(settings: Settings, study: Study, packs: tuple[Pack, ...] | list[Pack]) -> None:
    """Write the packs' shards, as a driver would."""
    ledger = Ledger(settings.study_root(study.id))
    for pack in packs:
        ledger.append(
            pack, [result_of(t) for t in pack.trials], {"started_at": "2026-12-01T00:00:00+00:00", "seconds": 1.0}
        )


def tick_until(parts: Services, study: Study, *states: str, seconds: float = 90) -> Study:
    """Let the reconciler look until the study is in one of the states."""
    deadline = time.monotonic() + seconds
    while True:
        parts.reconciler.tick()
        seen = parts.store.get(study.id)
        if seen.state in states:
            return seen
        assert time.monotonic() < deadline, f"still {seen.state}: {seen.reason}"
        time.sleep(0.02)


# Analyses, run in the worker process: found there by their names.


def quick_verdict(task: AnalysisTask) -> list[dict[str, Any]]:
    """An analysis that writes the files of a real one, at once."""
    ledger = Ledger(task.root)
    plan = make_plan(parse_spec(parse_document(task.spec, "json")), DataFacts(**task.facts))
    sink = pa.BufferOutputStream()
    pq.write_table(
        ledger.table(plan, absent=task.absent).replace_schema_metadata({ATTEMPT_KEY: str(task.attempt)}), sink
    )
    ledger.write_file(RESULTS_FILE, sink.getvalue().to_pybytes())
    ledger.write_file("analysis/verdict.json", b'{"schema": 1}')
    ledger.write_file("analysis/report.html", b"<html></html>")
    return [{"hypothesis": 0, "verdict": "undecided"}]


def failing(task: AnalysisTask) -> None:
    raise ValueError("three is not a number of mine")


def dying(task: AnalysisTask) -> None:
    os._exit(7)


def endless(task: AnalysisTask) -> None:
    time.sleep(3600)


def echo(task: AnalysisTask) -> list[dict[str, Any]]:
    return [asdict(task)]
