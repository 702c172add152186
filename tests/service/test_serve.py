"""The service as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.studies import SMALLEST


@contextmanager
def process(folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = {
        "NORMSTUDY_DATA_DIR": str(folder),
        "NORMSTUDY_PORT": "0",
        "NORMSTUDY_RAY_DASHBOARD_URL": "http://127.0.0.1:9",
        "NORMSTUDY_MLFLOW_URL": "http://127.0.0.1:9",
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "service.serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | variables,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def address(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line.startswith("normstudy: listening on http://127.0.0.1:"), line
    return line.removeprefix("normstudy: listening on ").strip()


def test_it_says_where_it_listens_and_ends_when_told(tmp_path: Path):
    with process(tmp_path) as service:
        url = address(service)
        study = httpx.post(f"{url}/v1/studies", json=SMALLEST).json()
        service.send_signal(signal.SIGTERM)
        _, log = service.communicate(timeout=20)
        assert service.returncode in (0, -signal.SIGTERM)
        assert f"study={study['id']}" in log
        assert "Traceback" not in log


def test_kill_9_loses_nothing(tmp_path: Path):
    with process(tmp_path) as service:
        study = httpx.post(f"{address(service)}/v1/studies", json=SMALLEST).json()
    with process(tmp_path) as service:
        again = httpx.get(f"{address(service)}/v1/studies/{study['id']}").json()
    assert again["created_at"] == study["created_at"]
    assert again["state"] == "QUEUED"


def test_a_port_in_use(tmp_path: Path):
    with process(tmp_path / "a") as first:
        port = address(first).rsplit(":", 1)[1]
        with process(tmp_path / "b", NORMSTUDY_PORT=port) as second:
            _, said = second.communicate(timeout=60)
            assert second.returncode == 1
            assert f"cannot listen on 127.0.0.1:{port}" in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NORMSTUDY_HOST", "0.0.0.0", "no access tokens yet"),
        ("NORMSTUDY_PORT", "eighty", "NORMSTUDY_PORT"),
        ("NORMSTUDY_DATA_ROOTS", "[", "NORMSTUDY_DATA_ROOTS"),
    ],
)
def test_bad_settings_are_told_in_a_line(tmp_path: Path, name: str, value: str, said: str):
    with process(tmp_path, **{name: value}) as service:
        out, log = service.communicate(timeout=60)
        assert service.returncode == 2
        assert said in log
        assert log.count("\n") == 1, "its own line, and none of the settings that follow from it"
        assert out == ""


def test_a_database_that_is_away(tmp_path: Path):
    url = f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/none"
    with process(tmp_path, NORMSTUDY_DATABASE_URL=url) as service:
        out, log = service.communicate(timeout=60)
        assert service.returncode == 1
        assert log.startswith("normstudy: the database does not answer: ")
        assert log.count("\n") == 1, "one line, and no traceback"
        assert out == ""
