"""Exactly the tagged processes are found and ended, and ports are not given out twice."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service import ports, processes
from tests.ports import free_port

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
ORPHAN = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"


class Tagged:
    """Starts processes with tags; ends them all at the end of the test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, tag: str, code: str = SLEEP) -> subprocess.Popen[str]:
        environment = os.environ | {processes.VARIABLE: tag}
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process


@pytest.fixture
def start() -> Iterator[Tagged]:
    tagged = Tagged()
    yield tagged
    for process in tagged.started:
        process.kill()
        process.communicate()


def test_ends_the_tagged_and_nobody_else(start: Tagged, tmp_path: Path):
    tag, other = processes.new_tag(tmp_path / "one"), processes.new_tag(tmp_path / "other")
    ours, theirs, untagged = start(f"{tag}ray"), start(f"{other}ray"), start("")
    assert processes.end(tag) == 1
    assert ours.wait(5) == -signal.SIGTERM
    assert theirs.poll() is None
    assert untagged.poll() is None


def test_every_start_on_a_folder_shares_its_beginning(tmp_path: Path):
    first, second = processes.new_tag(tmp_path), processes.new_tag(tmp_path)
    assert first != second
    assert first.startswith(processes.folder_tag(tmp_path))
    assert second.startswith(processes.folder_tag(tmp_path))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert processes.folder_tag(link) == processes.folder_tag(tmp_path)


def test_finds_what_has_lost_its_parent(start: Tagged, tmp_path: Path):
    tag = processes.new_tag(tmp_path)
    start(f"{tag}ray", ORPHAN).wait()
    (orphan,) = processes.tagged(tag)
    assert processes.end(tag) == 1
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_kills_what_does_not_listen(start: Tagged, tmp_path: Path):
    tag = processes.new_tag(tmp_path)
    process = start(f"{tag}ray", STUBBORN)
    assert process.stdout is not None
    process.stdout.readline()
    processes.end(tag, grace=0.3)
    assert process.wait(5) == -signal.SIGKILL


def test_spares_whom_it_is_told_to(start: Tagged, tmp_path: Path):
    tag = processes.new_tag(tmp_path)
    process = start(f"{tag}watchdog")
    assert processes.end(tag, spare={process.pid}) == 0
    assert process.poll() is None


def test_does_not_end_itself(start: Tagged, tmp_path: Path):
    tag = processes.new_tag(tmp_path)
    code = f"from service import processes; print(processes.end({tag!r}))"
    process = start(f"{tag}up", code)
    assert process.communicate(timeout=20)[0] == "0\n"
    assert process.returncode == 0


def test_watchdog_ends_the_rest_when_its_input_closes(start: Tagged, tmp_path: Path):
    tag = processes.new_tag(tmp_path)
    ray_folder = tmp_path / f"{processes.RAY_FOLDER_PREFIX}x"
    logs = ray_folder / processes.RAY_SESSIONS / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "job-driver-a.log").write_text("the study's log")
    child = start(f"{tag}ray")
    command = [sys.executable, "-m", "service.processes", tag, str(ray_folder), str(tmp_path / "logs")]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {processes.VARIABLE: f"{tag}watchdog"})
    time.sleep(0.5)
    assert child.poll() is None
    watchdog.communicate(timeout=20)
    assert child.wait(5) == -signal.SIGTERM
    assert not ray_folder.exists()
    assert (tmp_path / "logs" / "jobs" / "job-driver-a.log").read_text() == "the study's log"


def test_removes_no_folder_but_a_stacks_ray(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.mkdir()
    link = tmp_path / f"{processes.RAY_FOLDER_PREFIX}link"
    link.symlink_to(precious)
    for folder in (precious, link, tmp_path / "missing"):
        processes.retire_ray_folder(folder, tmp_path / "logs")
    assert precious.exists()


def test_sees_who_listens(tmp_path: Path, start: Tagged):
    tag = processes.new_tag(tmp_path)
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    process = start(f"{tag}api", f"{code}; time.sleep(600)")
    assert process.stdout is not None
    port = int(process.stdout.readline())
    assert processes.listens(f"{tag}api", port)
    assert not processes.listens(f"{tag}ray", port)
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert not processes.listens(tag, mine.getsockname()[1])


def test_a_leased_port_is_not_given_out_again():
    usual = free_port()
    first = ports.lease(usual)
    second = ports.lease(usual)
    assert first.port != second.port
    with pytest.raises(ports.PortTaken, match=str(first.port)):
        ports.lease(usual, first.port)
    first.release()
    assert ports.lease(usual, first.port).port == first.port
    second.release()


def test_a_used_port_is_not_leased():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        with pytest.raises(ports.PortTaken, match="taken"):
            ports.lease(port, port)
        found = ports.lease(port)
        assert found.port > port
        found.release()
