"""MLflow as the published record: a projection of the ledger, sent from a thread beside the training.

The ledger is the outbox. A shard without its `tracked/` marker is what MLflow still lacks, so
MLflow may be away for as long as it likes: training does not notice, nothing is lost, and a
rerun of the driver sends what is missing. A pack that was half sent when something died is
found again by its tag and completed, so that no run appears twice.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

from trials.ledger import Ledger, LedgerError
from trials.plan import Plan
from trials.records import METRICS, MLFLOW_VIEW, PROBES, Pack, TrialConfig, experiment_name
from trials.spec import StudySpec

log = logging.getLogger(__name__)

# An outage must cost the thread seconds, not the minutes of MLflow's default seven retries.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # a blind retry of a create would make a second run
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # costs one more request a run

_PARAMETERS = (
    *(field.name for field in fields(TrialConfig) if field.name != "path"),
    "lanes_at_once",
)
_RUN_STATUS = {"succeeded": "FINISHED", "diverged": "FINISHED", "pruned": "FINISHED", "cancelled": "KILLED"}
_POLL_SECONDS = 0.5

# MLflow's table shows neither parameters nor metrics until someone picks columns. A shared view, which
# MLflow keeps as a tag of the experiment, picks them: all trials in one list (a sort by a metric unfolds
# the nesting), best validation accuracy first. `service.tracking` links to it.
_TABLE_VIEW = {
    "selectedColumns": [
        *(f"params.`{name}`" for name in ("normaliser", "batch_size", "learning_rate", "seed")),
        *(f"metrics.`{name}`" for name in ("validation_accuracy", "test_accuracy", "train_loss")),
        "tags.`normstudy.state`",
    ],
    "orderByKey": "metrics.`validation_accuracy`",
    "orderByAsc": False,
    "runsHiddenMode": "FIRST_20_RUNS",
}


class Tracker:
    """Sends finished packs to MLflow, in the plan's order of finishing, each trial once.

    Args:
        patience: seconds `finish` goes on trying while MLflow does not answer.
    """

    def __init__(
        self, ledger: Ledger, plan: Plan, spec: StudySpec, study_id: str, mlflow_url: str, patience: float = 20.0
    ):
        self._ledger, self._plan, self._spec = ledger, plan, spec
        self._study_id, self._url, self._patience = study_id, mlflow_url, patience
        self._packs = {pack.key: pack for pack in plan.packs}
        self._client: Any = None
        self._experiment_id = ""
        self._parent_id = ""
        self._training_over = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self.seconds = 0.0  # wall time spent talking to MLflow
        self.trials_sent = 0

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> bool:
        """Send the rest; give up after `patience` seconds without an answer.

        Returns whether MLflow now has everything.
        """
        self._training_over.set()
        self._thread.join()
        return self._is_current()

    def stop(self) -> None:
        """Stop soon, whatever is left unsent."""
        self._stop.set()
        self._training_over.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        silent_since: float | None = None
        while not self._stop.is_set():
            last_round = self._training_over.is_set()
            started = time.monotonic()
            try:
                self._send_all()
                silent_since = None
                if last_round:
                    return
            except Exception as error:  # whatever MLflow or the network does, training must not notice
                self._parent_id = ""  # look everything up again: a user may have deleted it
                if silent_since is None:
                    log.warning("tracking is delayed, MLflow at %s: %s", self._url, _first_line(error))
                silent_since = silent_since or started
                if last_round and time.monotonic() - silent_since > self._patience:
                    log.warning("tracking stays delayed; run the study again to send the rest")
                    return
                self._training_over.wait(2.0) if not last_round else self._stop.wait(1.0)
            finally:
                self.seconds += time.monotonic() - started
            if not last_round:
                self._training_over.wait(_POLL_SECONDS)

    def _is_current(self) -> bool:
        return self._ledger.finished() <= self._ledger.tracked()

    def _send_all(self) -> None:
        self._connect()
        tracked = self._ledger.tracked()
        waiting = self._ledger.finished() - tracked
        done = sum(len(self._packs[key].trials) for key in tracked if key in self._packs)
        for pack in self._plan.packs:
            if pack.key in waiting:
                if self._stop.is_set():
                    return
                self._send_pack(pack)
                done += len(pack.trials)
                self._client.set_tag(self._parent_id, "normstudy.progress", f"{done}/{self._plan.trials}")

    def _connect(self) -> None:
        """Find or make the study's experiment and parent run."""
        if self._parent_id:
            return
        from mlflow import MlflowClient  # seconds of import, on this thread

        self._client = MlflowClient(tracking_uri=self._url)
        name = experiment_name(self._spec.name, self._study_id)
        experiment = self._client.get_experiment_by_name(name)
        if experiment and experiment.lifecycle_stage == "deleted":
            raise RuntimeError(f"experiment {name!r} was deleted in MLflow; restore it there to have the rest sent")
        # The kind makes MLflow's page open on runs and their comparison, not on traces.
        tags = {"normstudy.study_id": self._study_id, "mlflow.experimentKind": "custom_model_development"}
        tags[f"mlflow.sharedViewState.{MLFLOW_VIEW}"] = json.dumps(_TABLE_VIEW)
        if self._spec.description:
            tags["mlflow.note.content"] = self._spec.description
        self._experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(name, tags=tags)
        )
        runs = self._client.search_runs([self._experiment_id], "tags.`normstudy.role` = 'study'", max_results=1)
        if runs:
            parent = runs[0]
        else:
            parent = self._client.create_run(
                self._experiment_id,
                run_name=self._spec.name,
                tags={
                    "normstudy.role": "study",
                    "normstudy.study_id": self._study_id,
                    "normstudy.spec_hash": self._spec.content_hash(),
                },
            )
        if parent.info.status != "RUNNING":
            self._client.update_run(parent.info.run_id, status="RUNNING")  # a study that is run again
        self._client.log_text(parent.info.run_id, self._spec.canonical_json(), "spec.json")
        self._parent_id = parent.info.run_id

    def _send_pack(self, pack: Pack) -> None:
        try:
            rows = self._ledger.shard(pack.key).to_pylist()
            provenance = self._ledger.provenance(pack.key)
        except LedgerError as error:  # damaged since it was listed: the pack will be run again
            log.warning("pack %s is not sent: %s", pack.label, error)
            return
        begun = self._runs_of(pack.key)
        run_ids = []
        start = int(datetime.fromisoformat(provenance["started_at"]).timestamp() * 1000)
        end = start + int(provenance["seconds"] * 1000)
        for row in rows:
            run_id, state = begun.get(row["trial_key"], ("", None))
            if state != row["state"]:
                run_id = self._send_trial(pack, row, run_id, start, end)
                self.trials_sent += 1
            run_ids.append(run_id)
        self._ledger.mark_tracked(pack.key, run_ids)

    def _runs_of(self, pack_key: str) -> dict[str, tuple[str, str | None]]:
        """Runs of the pack that MLflow already has: trial key → (run id, trial state if it was completed).

        A second run of one trial (its create was applied, but the answer never came) is removed.
        """
        found: dict[str, tuple[str, str | None]] = {}
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id], f"tags.`normstudy.pack` = '{pack_key}'", max_results=1000, page_token=token
            )
            for run in page:
                key, state = run.data.tags["normstudy.trial_key"], run.data.tags.get("normstudy.state")
                if key in found:
                    self._client.delete_run(run.info.run_id)
                    continue
                found[key] = (run.info.run_id, state if run.info.status != "RUNNING" else None)
            token = page.token
            if not token:
                return found

    def _send_trial(self, pack: Pack, row: dict[str, Any], run_id: str, start: int, end: int) -> str:
        from mlflow.entities import Metric, Param

        outcome = {"normstudy.state": row["state"]} | ({"normstudy.reason": row["reason"]} if row["reason"] else {})
        if run_id:  # begun before, or of a pack that was lost and has been run again
            for name in ("normstudy.state", "normstudy.reason"):
                self._client.set_tag(run_id, name, outcome.get(name, "none"))
        else:
            tags = {
                "normstudy.role": "trial",
                "normstudy.study_id": self._study_id,
                "normstudy.trial_key": row["trial_key"],
                "normstudy.cell_key": row["cell_key"],
                "normstudy.pack": pack.key,
                "mlflow.parentRunId": self._parent_id,
                **outcome,
            }
            name = f"{pack.label.split('-', 1)[0]} B{row['batch_size']} lr{row['learning_rate']:g} seed{row['seed']}"
            run = self._client.create_run(self._experiment_id, start_time=start, tags=tags, run_name=name)
            run_id = run.info.run_id
        metrics = _metrics(row, start, end, Metric)
        parameters = [Param(name, str(row[name])) for name in _PARAMETERS if row[name] is not None]
        for first in range(0, max(1, len(metrics)), 900):  # one request takes at most 1,000 entries
            self._client.log_batch(
                run_id, metrics=metrics[first : first + 900], params=parameters if first == 0 else ()
            )
        self._client.set_terminated(run_id, _status(row["state"]), end)
        return run_id


def _metrics(row: dict[str, Any], start: int, end: int, metric_type: Any) -> Sequence[Any]:
    """Metrics after each epoch (step: the epoch) and of each probe's affine maps (step: updates before it).

    A value that is not finite is left out: MLflow would store infinity as a number.
    """
    epochs, updates = max(1, row["epochs_completed"]), max(1, row["updates"])
    metrics = [
        metric_type(name, value, start + (end - start) * (epoch + 1) // epochs, epoch + 1)
        for name in METRICS
        for epoch, value in enumerate(row[f"{name}_by_epoch"])
        if value is not None
    ]
    metrics += [
        metric_type(f"probe_{name}.{place}", value, start + (end - start) * step // updates, step)
        for name in PROBES
        for step, values in zip(row["probe_updates"] or [], row[f"probe_{name}"] or [], strict=True)
        for place, value in enumerate(values)
        if value is not None
    ]
    return metrics


def _status(state: str) -> str:
    return _RUN_STATUS.get(state, "FAILED")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
