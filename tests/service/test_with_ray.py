"""The service and the real driver on a real Ray head: what the fake one says is what Ray says."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from service.analysing import Analyser, analyse_study
from service.cluster import Cluster, ClusterUnavailable, Job, JobStatus
from service.lifecycle import cancel
from service.services import Services
from service.settings import Settings
from service.store import Study
from tests.ports import free_port
from tests.service.helpers import add_study, services_for, settings_for, tick_until
from tests.studies import spec
from trials.ledger import Ledger


class Head:
    """A Ray head of one's own on loopback; its process group is its own, so killing it touches nobody else."""

    def __init__(self, folder: Path):
        ports: set[int] = set()
        while len(ports) < 4:  # a port that nobody holds yet may be found free twice
            ports.add(free_port())
        self._folder, self._ports = folder, dict(zip(("gcs", "dashboard", "agent", "client"), ports, strict=True))
        self.url = f"http://127.0.0.1:{self._ports['dashboard']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--num-cpus=2"]
        command += [f"--port={self._ports['gcs']}", f"--dashboard-port={self._ports['dashboard']}"]
        command += [f"--dashboard-agent-listen-port={self._ports['agent']}"]
        command += [f"--ray-client-server-port={self._ports['client']}", "--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--temp-dir={self._folder}"]
        quiet = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        with open(self._folder / "head.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while True:
            try:
                Cluster(self.url).ping()
                return
            except ClusterUnavailable:
                assert time.monotonic() < deadline, (self._folder / "head.log").read_text()
                time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to everything that the head started."""
        if self._process is None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        for member in family:  # workers and drivers have groups of their own
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=10)


@contextmanager
def ray_head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="nr"))  # Ray's sockets need a short path
    head = Head(folder)
    try:
        head.start()
        yield head
    finally:
        head.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as head:
        yield head


@pytest.fixture
def settings(tmp_path: Path, head: Head) -> Settings:
    return settings_for(tmp_path, ray_dashboard_url=head.url)


@pytest.fixture
def parts(settings: Settings) -> Iterator[Services]:
    with services_for(settings, Analyser(120, analyse_study)) as parts:
        yield parts


def ended(cluster: Cluster, job_id: str) -> Job:
    deadline = time.monotonic() + 60
    while True:
        job = cluster.job(job_id)
        assert job is not None
        if job.status.has_ended:
            return job
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_jobs_as_the_service_understands_them(head: Head):
    cluster = Cluster(head.url)
    assert cluster.ping().startswith("2.")
    assert cluster.job("nothing") is None
    assert cluster.logs("nothing") == ""
    cluster.stop("nothing")

    assert cluster.submit("good", "echo done", {"a": "b"})
    assert not cluster.submit("good", "echo done", {}), "Ray's answer to a known id is understood"
    assert ended(cluster, "good") == Job(JobStatus.SUCCEEDED, "Job finished successfully.", 0)
    assert "done" in cluster.logs("good")

    cluster.submit("fatal", "echo start; echo 'normstudy: fatal: unschedulable: no GPU'; exit 3", {})
    assert ended(cluster, "fatal").fatal_reason == "unschedulable: no GPU"
    cluster.submit("crash", "echo 'ValueError: x' >&2; exit 1", {})
    crash = ended(cluster, "crash")
    assert crash.fatal_reason is None
    assert crash.summary == "the driver ended with status 1: ValueError: x"
    cluster.submit("killed", "kill -9 $$", {})
    assert ended(cluster, "killed").summary == "the driver was killed by signal 9"
    cluster.submit("stopped", "sleep 600", {"normstudy_study": "s0123456789ab"})
    assert cluster.alive("s0123456789ab") == ["stopped"]
    cluster.stop("stopped")
    assert ended(cluster, "stopped").status is JobStatus.STOPPED
    assert cluster.alive("s0123456789ab") == []


def test_a_study_from_submission_to_verdict(parts: Services, settings: Settings):
    study = add_study(parts.store, spec())
    done = tick_until(parts, study, "COMPLETED", "FAILED", seconds=200)
    assert (done.state, done.reason) == ("COMPLETED", None)
    assert done.verdict is not None
    assert done.progress is not None
    assert done.progress["trials_done"] == 16
    assert Ledger(settings.study_root(study.id)).has_file("analysis/results.parquet")


LONG = {"training.budget": {"epochs": 3000}, "space.batch_size": [4, 64]}


def drivers_of(study: Study) -> list[psutil.Process]:
    """The study's driver, and what its workers are."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if study.id in words and "trials.driver" in words and "-c" not in words:
            found.append(process)
    return found


def until_driver(study: Study) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while not (found := drivers_of(study)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_cancelled_study_leaves_no_process(parts: Services):
    study = add_study(parts.store, spec(**LONG))
    tick_until(parts, study, "RUNNING")
    drivers = until_driver(study)
    cancel(parts.store, study.id)
    tick_until(parts, study, "CANCELLED", seconds=30)
    assert psutil.wait_procs(drivers, timeout=10)[1] == []


def test_a_killed_driver_is_run_again(parts: Services):
    study = add_study(parts.store, spec(**LONG))
    tick_until(parts, study, "RUNNING")
    for driver in until_driver(study):
        driver.kill()
    seen = tick_until(parts, study, "QUEUED")
    assert seen.attempt == 2
    assert "killed by signal 9" in (seen.reason or "")
    tick_until(parts, study, "RUNNING")
    until_driver(study)
    cancel(parts.store, study.id)
    tick_until(parts, study, "CANCELLED", seconds=30)


def test_a_head_that_is_killed_and_started_again(parts: Services, head: Head):
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    head.kill()
    parts.reconciler.tick()
    seen = parts.store.get(study.id)
    assert seen.state == "RUNNING"
    assert "waiting for Ray" in (seen.reason or "")
    head.start()
    done = tick_until(parts, study, "COMPLETED", "FAILED", seconds=200)
    assert (done.state, done.attempt) == ("COMPLETED", 2)
