"""The embedded stack for real: Ray, MLflow and the service started, used, killed and started again.

One `up` serves most of these tests, in their order; the last of them kills it with SIGKILL, and
`demo` then starts on what it left.
"""

import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from service import processes
from service.migrate import open_store
from service.places import DataFolder, StackState, read_state, running_stack
from service.stack import AlreadyRunning, CannotStart, PartFailed, Stack
from tests.studies import document

NORMSTUDY = [sys.executable, "-m", "service.cli"]
START_SECONDS = 180


def left(folder: Path) -> list[str]:
    """What still runs of any stack on this folder."""
    found: list[str] = []
    for process in processes.tagged(processes.folder_tag(folder)):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def until(what: Callable[[], object], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Up:
    """A `normstudy up`, or `demo`, in a process of its own."""

    def __init__(self, folder: Path, log: Path, *options: str, command: str = "up", **environment: str):
        self.folder, self.log = folder, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*NORMSTUDY, command, "--data-dir", str(folder), *options],
                stdout=out,
                stderr=out,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def state(self) -> StackState:
        state = read_state(DataFolder(self.folder))
        assert state is not None
        return state

    def wait_until_ready(self) -> None:
        until(lambda: "Ready." in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        processes.end(processes.folder_tag(self.folder))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("stack")
    stray = {
        "RAY_ADDRESS": "127.0.0.1:9",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    up = Up(folder / "data dir", folder / "up.log", "--cpus", "1", **stray)
    try:
        up.wait_until_ready()
        yield up
    finally:
        up.close()


def normstudy(*arguments: str, folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NORMSTUDY_URL"} | {"NORMSTUDY_HOME": str(folder)}
    return subprocess.run(
        [*NORMSTUDY, *arguments], capture_output=True, text=True, env=environment | options, timeout=280
    )


def studies(folder: Path) -> dict[str, tuple[str, str]]:
    """Id → name and state of every study in the folder's database."""
    store = open_store(f"sqlite:///{DataFolder(folder).database}")
    try:
        return {study.id: (study.name, study.state) for study in store.page(100)}
    finally:
        store.close()


def test_three_addresses_answer(up: Up):
    state = up.state
    assert state.ready
    for url in (state.api, state.ray_dashboard, state.mlflow):
        assert url in up.text
        assert httpx.get(url, follow_redirects=True, trust_env=False, timeout=20).status_code in {200, 404}
    parts = httpx.get(f"{state.api}/readyz", trust_env=False).json()["parts"]
    assert set(parts.values()) == {"ok"}


def test_every_port_is_on_loopback(up: Up):
    listening = [
        connection.laddr.ip
        for process in processes.tagged(up.state.tag)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) > 3
    assert all(ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in listening)


def test_nobody_else_can_look_into_rays_folder(up: Up):
    assert Path(up.state.ray_folder).stat().st_mode & 0o077 == 0
    assert up.folder.stat().st_mode & 0o077 == 0


def test_a_second_up_says_where_the_first_is(up: Up):
    done = normstudy("up", folder=up.folder)
    assert done.returncode == 1
    assert up.state.api in done.stderr
    with pytest.raises(AlreadyRunning) as caught:
        Stack(up.folder).start()
    assert caught.value.state == running_stack(up.folder)
    assert up.process.poll() is None


def test_a_study_from_the_command_line_to_its_verdict(up: Up, tmp_path: Path):
    file = tmp_path / "study.json"
    file.write_text(json.dumps(document(name="end to end")))
    done = normstudy("submit", str(file), "--watch", "--json", folder=up.folder)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    assert study["state"] == "COMPLETED"
    assert study["progress"]["states"] == {"succeeded": 16}
    assert [arm["normaliser"] for arm in study["analysis"]["arms"]] == ["none", "norm_like"]
    shown = normstudy("show", "end to end", folder=up.folder)
    assert shown.returncode == 0
    assert "norm_like" in shown.stdout
    saved = normstudy("report", "end to end", "-o", str(tmp_path / "report.html"), folder=up.folder)
    assert saved.returncode == 0
    assert "norm_like" in (tmp_path / "report.html").read_text()
    # The service's MLflow has it, not the stray one of the environment.
    experiments = httpx.post(
        f"{up.state.mlflow}/api/2.0/mlflow/experiments/search", json={"max_results": 10}, trust_env=False
    ).json()["experiments"]
    assert any(study["id"] in experiment["name"] for experiment in experiments)


def test_a_part_that_dies_comes_back(up: Up):
    server = next(iter(processes.tagged(f"{up.state.tag}mlflow")))
    server.kill()
    until(lambda: "MLflow is back" in up.text)
    assert httpx.get(f"{up.state.mlflow}/health", trust_env=False).is_success
    assert up.process.poll() is None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts(tmp_path: Path, signum: signal.Signals):
    if signal.getsignal(signum) is signal.SIG_IGN:  # under nohup; `up` would rightly take it over
        signal.signal(signum, signal.SIG_DFL)
    starting = Up(tmp_path / "data", tmp_path / "up.log")
    try:
        until(lambda: len(left(starting.folder)) > 3)
        ray_folder = Path(starting.state.ray_folder)
        starting.process.send_signal(signum)
        assert starting.process.wait(40) == 0, starting.text
        assert not left(starting.folder)
        assert not ray_folder.exists()
        assert running_stack(starting.folder) is None
    finally:
        starting.close()


def test_a_part_that_cannot_start_takes_the_others_with_it(up: Up, tmp_path: Path):
    """Beside the other stack, on other ports, which it leaves alone."""
    done = normstudy("up", folder=tmp_path / "half", NORMSTUDY_MAX_TRIALS="many")
    assert done.returncode == 1
    assert "Normstudy did not start: it ended (exit code 2)" in done.stderr
    assert "NORMSTUDY_MAX_TRIALS" in done.stderr  # from the tail of its log
    assert re.search(r"✓ Ray +http://127\.0\.0\.1:\d+", done.stdout)
    assert up.state.ray_dashboard not in done.stdout
    assert not left(tmp_path / "half")
    assert httpx.get(f"{up.state.api}/healthz", trust_env=False).is_success


def test_a_part_that_is_not_up_in_time(tmp_path: Path):
    stack = Stack(tmp_path, start_seconds=0.2)
    with pytest.raises(PartFailed, match="did not start within 0 s"):
        stack.start()
    assert not left(tmp_path)
    stack.stop()  # again is no error


def test_what_cannot_be_used_is_said_at_once(tmp_path: Path):
    (tmp_path / "a" / "mlflow" / "mlflow.db").mkdir(parents=True)
    with pytest.raises(CannotStart, match=r"mlflow\.db cannot be used"):
        Stack(tmp_path / "a").start()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "normstudy.db").write_text("not a database, but a text of some length" * 20)
    with pytest.raises(CannotStart, match="not a database"):
        Stack(tmp_path / "b").start()
    (tmp_path / "c").write_text("")
    with pytest.raises(CannotStart, match="data folder"):
        Stack(tmp_path / "c").start()
    with pytest.raises(CannotStart, match="path has '#'"):
        Stack(tmp_path / "d#").start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = normstudy("up", "--port", str(port), folder=tmp_path / "e")
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr
    assert not left(tmp_path / "e")


def test_an_interrupted_demo_leaves_no_study_to_the_next(tmp_path: Path):
    demo = Up(tmp_path / "demo", tmp_path / "demo.log", command="demo")
    try:
        until(lambda: "running: " in demo.text or demo.process.poll() is not None)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(40) == 128 + signal.SIGINT, demo.text
        assert demo.text.count("stopped; the unfinished study was cancelled") == 1
        assert [state for _, state in studies(demo.folder).values()] in (["CANCELLING"], ["CANCELLED"])
        assert not left(demo.folder)
    finally:
        demo.close()


def test_kill_9_leaves_nothing_and_the_studies_stay(up: Up):
    """Ends the shared stack, so it comes last: `demo` starts on the folder it leaves behind."""
    ray_folder, before = Path(up.state.ray_folder), studies(up.folder)
    up.process.kill()
    up.process.wait()
    until(lambda: not left(up.folder), 30)
    until(lambda: not ray_folder.exists(), 30)
    assert running_stack(up.folder) is None

    leftover = subprocess.Popen(  # as there would be, had the watchdog been killed too
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env=os.environ | {processes.VARIABLE: f"{up.state.tag}api"},
    )
    done = normstudy("demo", "--data-dir", str(up.folder), folder=up.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert leftover.wait(5) == -signal.SIGTERM
    assert "720 trials: 720 succeeded" in done.stdout
    assert all(arm in done.stdout for arm in ("batch_norm", "norm_like", "affine_like"))
    assert "MLflow does not have all of it yet" not in done.stdout
    assert done.stdout.index("report file") < done.stdout.index("/v1/studies/")
    assert f"To open them again: normstudy up --data-dir '{up.folder}'" in done.stdout
    assert "Supported" in done.stdout or "Contradicted" in done.stdout or "Undecided" in done.stdout
    assert not left(up.folder)
    assert running_stack(up.folder) is None

    after = studies(up.folder)
    (made,) = after.keys() - before.keys()
    assert after == before | {made: ("batch-size-digits", "COMPLETED")}
    report = DataFolder(up.folder).studies / made / "analysis" / "report.html"
    assert "affine_like" in report.read_text()
