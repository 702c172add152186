"""A Jobs API whose jobs do as the test says, for what the real Ray can't be made to do on demand.

Used for: an answer that is lost after the job was taken; Ray away or refusing at a chosen moment;
a job in a chosen state at a chosen tick; a cancel that arrives in the middle of a submission.
Its answers are those that Ray 2.60 gave (`test_with_ray.py` holds the service against the real one).
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.ports import free_port


class FakeRay:
    """Jobs by submission id, and what has been asked. `stop` marks a job; the test ends it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submissions: list[dict[str, Any]] = []
        self.stops: list[str] = []
        self.requests = 0
        self.lose_answers = False
        self.answer_with: tuple[int, str] | None = None  # to everything
        self.refuse_with: tuple[int, str] | None = None  # to submissions
        self.on_submit: Callable[[], None] = lambda: None
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(*fake._get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._send(*fake._post(self.path, body))

            def _send(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def end(self, job_id: str, exit_code: int | None = 0, log: str = "", status: str = "") -> None:
        """The job has ended."""
        message = "Job finished successfully."
        if exit_code:
            message = f"Job entrypoint command failed with exit code {exit_code}, last available logs "
            message += f"(truncated to 20,000 chars):\n{log}"
        elif status == "STOPPED":
            message = "Job was intentionally stopped."
        status = status or ("FAILED" if exit_code else "SUCCEEDED")
        self.jobs[job_id].update(status=status, message=message, driver_exit_code=exit_code)

    @property
    def last(self) -> str:
        """Id of the job that was submitted last."""
        return self.submissions[-1]["submission_id"]

    def _get(self, path: str) -> tuple[int, str]:
        self.requests += 1
        if self.answer_with:
            return self.answer_with
        if path == "/api/version":
            return 200, json.dumps({"ray_version": "2.60.0"})
        if path == "/api/jobs/":
            return 200, json.dumps([{"submission_id": job_id} | job for job_id, job in self.jobs.items()])
        job = self.jobs.get(path.removeprefix("/api/jobs/"))
        return (200, json.dumps(job)) if job else (404, f"Job {path} does not exist")

    def _post(self, path: str, body: bytes) -> tuple[int, str]:
        self.requests += 1
        if self.answer_with:
            return self.answer_with
        if path == "/api/jobs/":
            if self.refuse_with:
                return self.refuse_with
            job = json.loads(body)
            job_id = job["submission_id"]
            if job_id in self.jobs:
                return 500, f"RuntimeError: ValueError: Job with submission_id {job_id} already exists."
            self.submissions.append(job)
            self.jobs[job_id] = {
                "status": "RUNNING",
                "message": "Job is currently running.",
                "driver_exit_code": None,
                "metadata": job.get("metadata"),
            }
            self.on_submit()
            if self.lose_answers:
                return 500, "No available agent to submit job, please try again later."
            return 200, json.dumps({"job_id": job_id, "submission_id": job_id})
        job_id = path.removeprefix("/api/jobs/").removesuffix("/stop")
        if job_id not in self.jobs:
            return 404, f"Job {job_id} does not exist"
        self.stops.append(job_id)
        return 200, json.dumps({"stopped": True})


@contextmanager
def fake_ray() -> Iterator[FakeRay]:
    fake = FakeRay()
    fake.start()
    try:
        yield fake
    finally:
        fake.stop()
