"""Entry point of a study's Ray job: plan − ledger → run the missing packs.

    python -m trials.driver --study-dir URI --study-id ID --attempt N --mlflow-url URL …

Starting, resuming, extending and retrying a study are all this one command. Exit status:
0 every planned trial has its row; 3 the study can never run (the last line of the log says
why, after `normstudy: fatal:`); anything else, run it again.
"""

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trials.ledger import Ledger
from trials.plan import Plan, make_plan
from trials.records import Pack
from trials.spec import SpecError, StudySpec, facts_for, parse_document, parse_spec
from trials.tracking import Tracker

log = logging.getLogger("normstudy.driver")

EXIT_INCOMPLETE = 1
EXIT_FATAL = 3
DATA_FILE = "data.json"


class Fatal(RuntimeError):
    """The study can never run as it is; trying again would not help."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(arguments)
    except Fatal as error:
        print(f"normstudy: fatal: {error}", flush=True)
        return EXIT_FATAL


def _run(arguments: argparse.Namespace) -> int:
    started = time.perf_counter()
    ledger = Ledger(arguments.study_dir)
    spec = parse_spec(parse_document(ledger.read_file("spec.json"), "json"))
    try:
        plan = make_plan(spec, facts_for(spec.data, arguments.data_root))
    except SpecError as error:  # it was valid when submitted: files under a data root have gone since
        raise Fatal(str(error)) from error
    if arguments.only_tracking:
        return _track(arguments, spec, plan, ledger)
    missing = ledger.to_run(plan)
    log.info("%s: %d of %d packs to run, %d trials planned", spec.name, len(missing), len(plan.packs), plan.trials)
    tracker = Tracker(ledger, plan, spec, arguments.study_id, arguments.mlflow_url)
    tracker.start()
    try:
        fit_seconds = _train(arguments, spec, missing, ledger)
    except BaseException:
        tracker.stop()
        raise
    left = ledger.missing(plan)
    if left:
        tracker.stop()
        log.error("%d packs have no results: %s", len(left), ", ".join(pack.label for pack in left[:10]))
        return EXIT_INCOMPLETE
    tracking_is_current = tracker.finish()
    account = {
        "attempt": arguments.attempt,
        "ended_at": datetime.now(UTC).isoformat(),
        "packs_run": len(missing),
        "wall_seconds": round(time.perf_counter() - started, 3),
        "fit_seconds": round(fit_seconds, 3),
        "training_seconds": round(sum(ledger.provenance(pack.key)["seconds"] for pack in missing), 3),
        "tracking_seconds": round(tracker.seconds, 3),
        "trials_tracked": tracker.trials_sent,
        "tracking_is_current": tracking_is_current,
    }
    ledger.write_file(f"attempts/{arguments.attempt}.json", json.dumps(account, indent=1).encode())
    log.info("ended: %s", json.dumps(account))
    return 0


def _track(arguments: argparse.Namespace, spec: StudySpec, plan: Plan, ledger: Ledger) -> int:
    """Send MLflow what it lacks of a study that has ended, however it ended; trains nothing."""
    tracker = Tracker(ledger, plan, spec, arguments.study_id, arguments.mlflow_url)
    tracker.start()
    is_current = tracker.finish()
    log.info("%d trials sent to MLflow, which has %s", tracker.trials_sent, "all" if is_current else "not all")
    return 0 if is_current else EXIT_INCOMPLETE


def _train(arguments: argparse.Namespace, spec: StudySpec, missing: Sequence[Pack], ledger: Ledger) -> float:
    """Run what is missing; seconds spent in Tune. Ray and torch load only where there is work."""
    if not missing:
        return 0.0
    import ray

    from trials.engine.data import DataError, load
    from trials.tune import Unschedulable, run_packs

    try:
        dataset = load(spec.data, arguments.data_root, arguments.cache_dir)
    except (DataError, SpecError) as error:
        raise Fatal(str(error)) from error
    log.info("data set %s loaded once, checksum %s", spec.data.dataset, dataset.checksum[:16])
    _check_same_data(ledger, dataset.checksum)
    ray.init(address=arguments.ray_address, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    fit_started = time.perf_counter()
    try:
        run_packs(spec, missing, dataset, ledger, attempt=arguments.attempt)
    except Unschedulable as error:
        raise Fatal(f"unschedulable: {error}") from error
    return time.perf_counter() - fit_started


def _check_same_data(ledger: Ledger, checksum: str) -> None:
    """All trials of a study see one data set: the first attempt keeps its checksum, later ones compare."""
    if not ledger.has_file(DATA_FILE):
        ledger.write_file(DATA_FILE, json.dumps({"checksum": checksum}).encode())
        return
    first = json.loads(ledger.read_file(DATA_FILE))["checksum"]
    if first != checksum:
        raise Fatal(
            f"the data set has changed since this study began (checksum {first[:16]}, now {checksum[:16]}): "
            "put the old files back and resume, or submit a new study"
        )


def _parse(argv: list[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m trials.driver", description="Run what is missing of one study.")
    parser.add_argument("--study-dir", required=True, help="path or URI of the study's folder")
    parser.add_argument("--study-id", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--mlflow-url", required=True)
    parser.add_argument("--data-root", type=Path, action="append", default=[], help="may be given several times")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where downloaded data sets are kept")
    parser.add_argument("--only-tracking", action="store_true", help="send MLflow what it lacks, train nothing")
    parser.add_argument("--ray-address", default="auto", help="the cluster to join (default: the job's own)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
