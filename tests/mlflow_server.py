"""A real MLflow server on SQLite for tests, as `normstudy up` starts one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.ports import free_port


class MlflowServer:
    """One server process on a folder; may be stopped and started again on the same port and data."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self._folder / "mlflow.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError((self._folder / "mlflow.log").read_text()[-2000:])

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)  # its own session: only what `start` started
            self._process.wait()
            self._process = None


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
