"""Ray, as the service sees it: the Jobs REST API of its dashboard, over plain HTTP.

ClusterError
├── ClusterUnavailable   no answer, or not now: ask again later
└── JobRefused           Ray will never take this job
"""

import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

FATAL_EXIT = 3
"""The driver's exit status where another attempt would not help."""

STUDY_KEY = "normstudy_study"
"""Name of the metadata that says whose job it is."""

_FATAL_LINE = re.compile(r"^normstudy: fatal: (.+)$", re.MULTILINE)

_RAYS_OWN_LINES = ("Running entrypoint for job", "Runtime env is setting up")


class ClusterError(Exception):
    """Base of what the cluster raises."""


class ClusterUnavailable(ClusterError):
    """Ray does not answer, or is still starting."""


class JobRefused(ClusterError):
    """Ray says that the request itself is wrong."""


class JobStatus(enum.StrEnum):
    """Ray's own statuses of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def has_ended(self) -> bool:
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


@dataclass(frozen=True)
class Job:
    """A job as Ray tells it. `message` ends with the last lines of the log where the job has failed."""

    status: JobStatus
    message: str
    exit_code: int | None

    @property
    def fatal_reason(self) -> str | None:
        """The driver's own word that no further attempt can help, if it gave one."""
        lines = _FATAL_LINE.findall(self.message)
        if self.status is not JobStatus.FAILED or self.exit_code not in (None, FATAL_EXIT) or not lines:
            return None
        return lines[-1].strip()

    @property
    def summary(self) -> str:
        """How the job ended, in one line."""
        if self.exit_code is not None and (self.exit_code < 0 or self.exit_code > 128):
            signal = -self.exit_code if self.exit_code < 0 else self.exit_code - 128  # as a shell says it
            return f"the driver was killed by signal {signal}"
        if self.exit_code:
            return f"the driver ended with status {self.exit_code}: {self._last_words()}"
        if self.status is JobStatus.STOPPED:
            return "the job was stopped in Ray"
        return (self.message.strip().splitlines() or ["no message"])[0][:300]

    def _last_words(self) -> str:
        """The last line of the log that the driver itself wrote."""
        lines = [line.strip() for line in self.message.splitlines()[1:] if line.strip()]
        own = [line for line in lines if not any(mark in line for mark in _RAYS_OWN_LINES)]
        return own[-1][:300] if own else "it printed nothing"


class Cluster:
    """Client of one Ray cluster; safe to use from several threads. Every call ends within `timeout` seconds.

    Args:
        url: address of the Ray dashboard, `http://127.0.0.1:8265`.
        token: of a cluster that runs with `RAY_AUTH_MODE=token`.
    """

    def __init__(self, url: str, timeout: float = 10.0, token: str | None = None):
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A proxy set for the outer world must not stand between the service and its own cluster.
        self._http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=False, headers=headers)

    def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> bool:
        """Start a job; False where one of that id exists already, whoever submitted it.

        Raises:
            ClusterUnavailable, JobRefused
        """
        body = {"submission_id": submission_id, "entrypoint": entrypoint, "metadata": dict(metadata)}
        try:
            answer = self._send("POST", "/api/jobs/", json=body)
            if self._read(answer).get("submission_id") != submission_id:
                raise ClusterUnavailable(f"{self.url} does not answer as Ray's Jobs API does")
        except ClusterError:
            # Ray answers a known id with a bare 500; and an answer may be lost after the job was taken.
            if self.job(submission_id) is not None:
                return False
            raise
        return True

    def job(self, submission_id: str) -> Job | None:
        """The job, or None where Ray does not know it (its head was restarted, say).

        Raises:
            ClusterUnavailable
        """
        answer = self._send("GET", f"/api/jobs/{quote(submission_id, safe='')}", missing=True)
        if answer.status_code == 404:
            return None
        return self._job(self._read(answer))

    def alive(self, study_id: str) -> list[str]:
        """Submission ids of the study's jobs that have not ended, whichever attempt they are of.

        Raises:
            ClusterUnavailable
        """
        try:
            listed = self._send("GET", "/api/jobs/").json()
        except ValueError:
            listed = None
        if not isinstance(listed, list) or not all(isinstance(details, dict) for details in listed):
            raise ClusterUnavailable(f"{self.url} does not answer as Ray's Jobs API does")
        found = []
        for details in listed:
            job_id = details.get("submission_id")  # none for a driver that was not submitted
            if not job_id or not _is_of(study_id, job_id, details.get("metadata") or {}):
                continue
            if not self._job(details).status.has_ended:
                found.append(str(job_id))
        return found

    def logs(self, submission_id: str) -> str:
        """All that the job has printed; empty where Ray does not know the job.

        Raises:
            ClusterUnavailable
        """
        answer = self._send("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs", missing=True)
        return "" if answer.status_code == 404 else str(self._read(answer).get("logs") or "")

    def stop(self, submission_id: str) -> None:
        """Ask the job to end: SIGTERM, and SIGKILL to its process group some seconds later.

        Raises:
            ClusterUnavailable
        """
        self._send("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop", missing=True)

    def ping(self) -> str:
        """The version of Ray that answers.

        Raises:
            ClusterUnavailable
        """
        return str(self._read(self._send("GET", "/api/version", timeout=3.0)).get("ray_version"))

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, *, missing: bool = False, **options: Any) -> httpx.Response:
        """The edge: httpx's errors and Ray's refusals leave as this module's. With `missing`, 404 is an answer."""
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClusterUnavailable(f"Ray at {self.url} does not answer: {error or type(error).__name__}") from error
        if answer.is_success or (missing and answer.status_code == 404):
            return answer
        said = f"Ray at {self.url} answered {answer.status_code}: {_last_line(answer.text)}"
        if answer.status_code in (400, 422):
            raise JobRefused(said)
        raise ClusterUnavailable(said)

    def _job(self, details: Mapping[str, Any]) -> Job:
        try:
            return Job(JobStatus(details["status"]), details.get("message") or "", details.get("driver_exit_code"))
        except (ValueError, KeyError) as error:
            raise ClusterUnavailable(f"{self.url} tells of a job without a known status: {error}") from error

    def _read(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            said = answer.json()
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise ClusterUnavailable(f"{self.url} does not answer as Ray's Jobs API does")
        return said


def submission_id(name: str, study_id: str, attempt: int) -> str:
    """The name of an attempt's job in Ray; being the same each time, it cannot be submitted twice."""
    return f"{slug(name)}-{study_id}-a{attempt}"


def slug(name: str, longest: int = 40) -> str:
    """A study's name as lower-case letters, digits and single hyphens; `study` where nothing is left."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:longest].strip("-") or "study"


def _is_of(study_id: str, job_id: str, metadata: Mapping[str, Any]) -> bool:
    return metadata.get(STUDY_KEY) == study_id or f"-{study_id}-" in job_id


def driver_entrypoint(
    python: str,
    *,
    study_dir: str,
    study_id: str,
    attempt: int,
    mlflow_url: str,
    data_roots: Sequence[str],
    cache_dir: str,
    only_tracking: bool = False,
) -> str:
    """The shell command of a study's job."""
    words = [python, "-m", "trials.driver", "--study-dir", study_dir, "--study-id", study_id]
    words += ["--attempt", str(attempt), "--mlflow-url", mlflow_url]
    for root in data_roots:
        words += ["--data-root", root]
    words += ["--cache-dir", cache_dir]
    if only_tracking:
        words.append("--only-tracking")
    return shlex.join(words)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "(nothing)"
