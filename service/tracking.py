"""MLflow, as the service uses it: it finds what the driver has published, and adds the verdict.

MLflow is the published record, not the truth: whatever it lacks or however long it is away, the
service answers all the same. Calls here may take seconds, so they belong on the publishing
thread of the lifecycle, never into a request.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from service.store import Study, StudyState
from trials.records import MLFLOW_VIEW, experiment_name

VERDICT_NAME = "verdict.json"
_RUN_STATUS = {StudyState.COMPLETED: "FINISHED", StudyState.FAILED: "FAILED", StudyState.CANCELLED: "KILLED"}


class TrackingUnavailable(Exception):
    """MLflow does not answer, or refuses, or does not have the study yet."""


@dataclass(frozen=True)
class StudyRun:
    """Where a study is in MLflow."""

    experiment_id: str
    run_id: str | None  # of the parent run, which the driver makes after the experiment


class Tracking:
    """The MLflow server at `url`, for one thread at a time; `is_alive` for any."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._client: Any = None

    def is_alive(self) -> bool:
        """Whether the server answers; takes 2 seconds at most."""
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def experiment_link(self, experiment_id: str) -> str:
        view = f"viewStateShareKey={MLFLOW_VIEW}&workflowType=machine_learning"
        return f"{self.url}/#/experiments/{experiment_id}/runs?{view}"

    def find(self, study: Study) -> StudyRun | None:
        """Where the study is, if the driver has published anything of it.

        Raises:
            TrackingUnavailable
        """
        client = self._connect()
        try:
            experiment = client.get_experiment_by_name(experiment_name(study.name, study.id))
            if experiment is None:
                return None
            runs = client.search_runs([experiment.experiment_id], "tags.`normstudy.role` = 'study'", max_results=1)
        except Exception as error:  # mlflow raises its own, requests' and urllib3's errors
            raise _unavailable(error) from error
        return StudyRun(experiment.experiment_id, runs[0].info.run_id if runs else None)

    def publish(self, study: Study, run_id: str, files: Mapping[str, bytes]) -> None:
        """Attach files to the study's parent run, tag it with the verdict, and end it as the study ended.

        Doing it again does no harm.

        Raises:
            TrackingUnavailable
        """
        client = self._connect()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    path = Path(folder) / name
                    path.write_bytes(content)
                    client.log_artifact(run_id, str(path))
            if VERDICT_NAME in files:
                _log_verdict(client, run_id, json.loads(files[VERDICT_NAME]), study.ended_at)
            for name, value in _tags(study).items():
                client.set_tag(run_id, name, value)
            ended_at: datetime | None = study.ended_at
            moment = int(ended_at.timestamp() * 1000) if ended_at else None
            client.set_terminated(run_id, _RUN_STATUS[StudyState(study.state)], moment)
        except Exception as error:  # as above
            raise _unavailable(error) from error

    def _connect(self) -> Any:
        if not self.is_alive():  # cheaper to find out than mlflow's own retries
            raise TrackingUnavailable(f"MLflow at {self.url} does not answer")
        if self._client is None:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            from mlflow import MlflowClient  # seconds of import, on the publishing thread

            self._client = MlflowClient(tracking_uri=self.url)
        return self._client


def _log_verdict(client: Any, run_id: str, verdict: Mapping[str, Any], ended_at: datetime | None) -> None:
    """The answers as the run's description, and each arm's slope as a metric, so that they can be seen at once."""
    sentences = [f"* {hypothesis['sentence']}" for hypothesis in verdict.get("hypotheses", [])]
    client.set_tag(run_id, "mlflow.note.content", "\n".join(sentences) or "The study states no hypothesis.")
    moment = int(ended_at.timestamp() * 1000) if ended_at else None
    for arm in verdict.get("arms", []):
        if arm["slope"] is not None:
            client.log_metric(run_id, f"slope_{arm['normaliser']}", arm["slope"], timestamp=moment)


def _tags(study: Study) -> dict[str, str]:
    tags = {"normstudy.state": study.state}
    if study.verdict is not None:
        tags["normstudy.verdict"] = ", ".join(h["verdict"] for h in study.verdict) or "no hypothesis"
        for hypothesis in study.verdict:
            tags[f"normstudy.verdict.{hypothesis['hypothesis']}"] = hypothesis["verdict"]
    if study.reason:
        tags["normstudy.reason"] = study.reason[:1000]
    return tags


def _unavailable(error: Exception) -> TrackingUnavailable:
    lines = str(error).strip().splitlines()
    return TrackingUnavailable(f"MLflow: {lines[0][:300] if lines else type(error).__name__}")
