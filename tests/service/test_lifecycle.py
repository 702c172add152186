"""The reconciler, look by look, against a Jobs API that does as the test says."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.analysing import Analyser
from service.cluster import submission_id
from service.lifecycle import cancel, resume
from service.problems import Conflict
from service.services import Services
from service.settings import Settings
from service.store import Study, StudyState, StudyUnknown
from tests.service import helpers
from tests.service.fake_ray import FakeRay
from tests.service.helpers import add_study, finish_packs, plan_of, services_for, settings_for, tick_until
from tests.studies import spec
from trials.ledger import Ledger

FATAL = "loading\nnormstudy: fatal: unschedulable: 1 GPU asked for, the cluster has none\n"


@pytest.fixture
def settings(tmp_path: Path, ray: FakeRay) -> Settings:
    return settings_for(
        tmp_path / "data", ray_dashboard_url=ray.url, driver_python="/opt/my python", max_running_studies=3
    )


@pytest.fixture
def start(settings: Settings) -> Iterator[Callable[..., Services]]:
    """Starts a service on the same database and storage, as after a `kill -9` of the one before."""
    with ExitStack() as stack:
        yield lambda analyser=None: stack.enter_context(services_for(settings, analyser))


@pytest.fixture
def parts(start: Callable[..., Services]) -> Services:
    return start()


@pytest.fixture
def study(parts: Services) -> Study:
    return add_study(parts.store, spec())


@pytest.fixture
def running(parts: Services, study: Study) -> Study:
    return tick_until(parts, study, "RUNNING")


PACKS = plan_of(spec()).packs


def states_of(parts: Services, study: Study) -> list[tuple[str, str | None]]:
    seen = parts.store.get(study.id)
    return [(row["state"], row["reason"]) for _, row in parts.library.open(seen).rows(seen, 1000)]


def test_a_queued_study_becomes_one_job(parts: Services, study: Study, ray: FakeRay, settings: Settings):
    seen = tick_until(parts, study, "RUNNING")
    for _ in range(3):
        parts.reconciler.tick()
    assert len(ray.submissions) == 1
    job = ray.submissions[0]
    assert job["submission_id"] == f"smallest-{study.id}-a1"
    assert job["entrypoint"] == (
        f"'/opt/my python' -m trials.driver --study-dir {settings.storage}/{study.id} --study-id {study.id} "
        f"--attempt 1 --mlflow-url {settings.mlflow_url} --data-root {settings.data_roots[0]} "
        f"--cache-dir {settings.cache_dir}"
    )
    assert Ledger(settings.study_root(study.id)).read_file("spec.json").decode() == study.spec
    assert (seen.attempt, seen.reason) == (1, None)
    assert seen.started_at == seen.attempt_started_at is not None


def test_a_finished_job_is_analysed_for_real(start: Callable[..., Services], ray: FakeRay, settings: Settings):
    from service.analysing import analyse_study

    parts = start(Analyser(120, analyse_study))
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS)
    ray.end(ray.last)
    parts.reconciler.tick()
    assert parts.store.get(study.id).state == "ANALYSING"
    done = tick_until(parts, study, "COMPLETED", "FAILED")
    assert (done.state, done.reason) == ("COMPLETED", None)
    assert [h["hypothesis"] for h in done.verdict or []] == [0]
    assert done.ended_at is not None
    assert done.progress is not None
    assert done.progress["states"] == {"succeeded": 16}
    ledger = Ledger(settings.study_root(study.id))
    assert b'"schema": 1' in ledger.read_file("analysis/verdict.json")
    assert b"<html" in ledger.read_file("analysis/report.html")
    assert ledger.has_file("analysis/results.parquet")


def test_success_without_all_results_is_tried_again(parts: Services, running: Study, ray: FakeRay, settings: Settings):
    finish_packs(settings, running, PACKS[:1])
    ray.end(ray.last)
    parts.reconciler.tick()
    seen = parts.store.get(running.id)
    assert (seen.state, seen.attempt) == ("QUEUED", 2)
    assert "3 packs have no results" in (seen.reason or "")
    tick_until(parts, running, "RUNNING")
    assert ray.last == f"smallest-{running.id}-a2"


def test_a_killed_driver_is_tried_again_and_then_given_up(
    parts: Services, running: Study, ray: FakeRay, settings: Settings
):
    finish_packs(settings, running, PACKS[:2])
    for attempt in (1, 2, 3):
        assert ray.last.endswith(f"-a{attempt}")
        ray.end(ray.last, 137, "training\nKilled\n")
        tick_until(parts, running, "FAILED" if attempt == 3 else "QUEUED")
        if attempt < 3:
            tick_until(parts, running, "RUNNING")
    seen = parts.store.get(running.id)
    assert "attempt 3 of 3 ended: the driver was killed by signal 9" in (seen.reason or "")
    assert "2 of 4 packs have no results" in (seen.reason or "")
    assert seen.verdict is not None, "what there is has been analysed"
    assert states_of(parts, running) == [("succeeded", None)] * 8 + [("lost", "study_failed")] * 8
    for _ in range(3):
        parts.reconciler.tick()
    assert len(ray.submissions) == 3


def test_a_crash_says_the_drivers_last_words(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 1, "Traceback …\nValueError: no such thing\nRunning entrypoint for job x: python\n")
    seen = tick_until(parts, running, "QUEUED")
    assert seen.reason == "attempt 1 of 3 ended: the driver ended with status 1: ValueError: no such thing"


def test_a_fatal_end_is_final(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, FATAL)
    seen = tick_until(parts, running, "FAILED", "QUEUED")
    assert (seen.state, seen.attempt) == ("FAILED", 1)
    assert seen.reason == "unschedulable: 1 GPU asked for, the cluster has none"
    assert seen.verdict is None
    assert set(states_of(parts, running)) == {("lost", "study_failed")}
    assert len(states_of(parts, running)) == 16


def test_status_3_without_the_line_is_no_fatal_end(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, "something else\n")
    assert tick_until(parts, running, "FAILED", "QUEUED").state == "QUEUED"


def test_a_job_that_ray_forgot_is_tried_again(parts: Services, running: Study, ray: FakeRay):
    ray.jobs.clear()
    seen = tick_until(parts, running, "QUEUED")
    assert "does not know the job" in (seen.reason or "")
    tick_until(parts, running, "RUNNING")
    assert [job["submission_id"][-2:] for job in ray.submissions] == ["a1", "a2"]


def test_attempts_are_not_needed_where_all_results_are_there(
    parts: Services, running: Study, ray: FakeRay, settings: Settings
):
    finish_packs(settings, running, PACKS)
    for attempt in (1, 2, 3):
        ray.end(ray.last, 1, "MLflow …\n")
        if attempt < 3:
            tick_until(parts, running, "QUEUED")
            tick_until(parts, running, "RUNNING")
    seen = tick_until(parts, running, "COMPLETED", "FAILED")
    assert (seen.state, seen.reason) == ("COMPLETED", None)


@pytest.mark.parametrize("way", ["refuses connections", "answers 500", "answers nonsense", "asks for a token"])
def test_ray_away(parts: Services, study: Study, ray: FakeRay, way: str, settings: Settings):
    def away() -> None:
        if way == "refuses connections":
            ray.stop()
        elif way == "answers 500":
            ray.answer_with = (500, "No available agent")
        elif way == "answers nonsense":
            ray.answer_with = (200, "<html>")
        else:
            ray.answer_with = (401, "Unauthorized: Missing authentication token")

    def back() -> None:
        ray.answer_with = None
        if way == "refuses connections":
            ray.start()

    def waits(state: str) -> None:
        for _ in range(3):
            parts.reconciler.tick()
        seen = parts.store.get(study.id)
        assert (seen.state, seen.attempt) == (state, 1)
        assert f"waiting for Ray at {ray.url}" in (seen.reason or "")

    away()
    waits("QUEUED")
    back()
    tick_until(parts, study, "RUNNING")
    away()
    waits("RUNNING")
    back()
    parts.reconciler.tick()
    assert parts.store.get(study.id).reason is None
    cancel(parts.store, study.id)
    away()
    waits("CANCELLING")
    back()
    parts.reconciler.tick()
    ray.end(ray.last, None, status="STOPPED")
    assert tick_until(parts, study, "CANCELLED").reason is None
    assert len(ray.submissions) == 1


def test_ray_away_is_found_out_once_a_look(parts: Services, ray: FakeRay):
    """Each study in turn would wait for its own timeout."""
    studies = [add_study(parts.store, spec()) for _ in range(3)]
    for study in studies:
        tick_until(parts, study, "RUNNING")
    ray.answer_with, ray.requests = (500, "No available agent"), 0
    parts.reconciler.tick()
    assert ray.requests == 1
    assert all("waiting for Ray" in (parts.store.get(study.id).reason or "") for study in studies)


def test_an_answer_that_is_lost_makes_no_second_job(parts: Services, study: Study, ray: FakeRay):
    ray.lose_answers = True
    tick_until(parts, study, "RUNNING")
    assert len(ray.submissions) == 1


def test_a_refused_job_fails_the_study(parts: Services, study: Study, ray: FakeRay):
    ray.refuse_with = (400, "Traceback …\nValueError: bad runtime_env")
    seen = tick_until(parts, study, "FAILED", "RUNNING")
    assert seen.state == "FAILED"
    assert "ValueError: bad runtime_env" in (seen.reason or "")


@pytest.mark.parametrize("moment", ["submitted", "running", "cancelling", "analysing"])
def test_a_service_killed_at_any_point_goes_on(
    start: Callable[..., Services], study: Study, ray: FakeRay, settings: Settings, parts: Services, moment: str
):
    if moment == "submitted":  # Ray has the job, the database does not know yet
        parts.cluster.submit(submission_id(study.name, study.id, 1), "true", {})
        assert parts.store.get(study.id).state == "QUEUED"
        tick_until(start(), study, "RUNNING")
    else:
        tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS[:2])
    if moment == "cancelling":
        cancel(parts.store, study.id)
        after = start()
        after.reconciler.tick()
        assert ray.stops == [ray.last]
        ray.end(ray.last, None, status="STOPPED")
        tick_until(start(), study, "CANCELLED")
        assert states_of(after, study) == [("succeeded", None)] * 8 + [("cancelled", "study_cancelled")] * 8
    else:
        finish_packs(settings, study, PACKS[2:])
        ray.end(ray.last)
        if moment == "analysing":
            tick_until(parts, study, "ANALYSING")
            parts.reconciler.tick()  # the worker has begun
        assert tick_until(start(), study, "COMPLETED").verdict is not None
    assert len(ray.submissions) == 1


def test_cancelling_before_there_is_a_job(parts: Services, study: Study, ray: FakeRay):
    cancel(parts.store, study.id)
    seen = tick_until(parts, study, "CANCELLED")
    assert ray.submissions == []
    assert seen.verdict is None
    assert set(states_of(parts, study)) == {("cancelled", "study_cancelled")}


def test_cancelling_in_the_middle_of_a_submission(parts: Services, study: Study, ray: FakeRay):
    ray.on_submit = lambda: cancel(parts.store, study.id) and None
    parts.reconciler.tick()
    assert parts.store.get(study.id).state == "CANCELLING"
    parts.reconciler.tick()
    assert ray.stops == [ray.last]
    parts.reconciler.tick()
    assert parts.store.get(study.id).state == "CANCELLING", "not before the job has ended"
    ray.end(ray.last, None, status="STOPPED")
    assert tick_until(parts, study, "CANCELLED").attempt == 1


def test_cancel_twice_is_the_same(parts: Services, running: Study, ray: FakeRay):
    assert cancel(parts.store, running.id).state == "CANCELLING"
    assert cancel(parts.store, running.id).state == "CANCELLING"
    ray.end(ray.last, None, status="STOPPED")
    tick_until(parts, running, "CANCELLED")
    assert cancel(parts.store, running.id).state == "CANCELLED"


def test_cancelling_what_has_ended(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, FATAL)
    tick_until(parts, running, "FAILED")
    with pytest.raises(Conflict, match="is FAILED"):
        cancel(parts.store, running.id)
    with pytest.raises(StudyUnknown):
        cancel(parts.store, "snone")


def test_cancelling_while_it_is_analysed(parts: Services, running: Study, ray: FakeRay, settings: Settings):
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    tick_until(parts, running, "ANALYSING")
    with pytest.raises(Conflict, match="its trials have ended"):
        cancel(parts.store, running.id)


@pytest.mark.parametrize("ended", ["FAILED", "CANCELLED"])
def test_resuming_runs_what_is_missing_with_fresh_attempts(
    parts: Services, running: Study, ray: FakeRay, settings: Settings, ended: str
):
    finish_packs(settings, running, PACKS[:1])
    if ended == "FAILED":
        ray.end(ray.last, 3, FATAL)
    else:
        cancel(parts.store, running.id)
        ray.end(ray.last, None, status="STOPPED")
    tick_until(parts, running, ended)
    assert len(states_of(parts, running)) == 16
    seen = resume(parts.store, running.id)
    assert (seen.state, seen.attempt, seen.reason, seen.verdict, seen.ended_at) == ("QUEUED", 2, None, None, None)
    assert len(states_of(parts, running)) == 4, "trials that have not run are not listed now"
    for attempt in (2, 3, 4):
        tick_until(parts, running, "RUNNING")
        assert ray.last.endswith(f"-a{attempt}")
        if attempt < 4:
            ray.end(ray.last, 1, "oh\n")
            assert tick_until(parts, running, "QUEUED", "FAILED").state == "QUEUED"
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    done = tick_until(parts, running, "COMPLETED")
    assert done.reason is None
    assert done.verdict is not None
    assert set(states_of(parts, running)) == {("succeeded", None)}


def test_resuming_what_has_not_ended(parts: Services, study: Study):
    with pytest.raises(Conflict, match="is QUEUED"):
        resume(parts.store, study.id)


def test_of_several_resumes_one_wins(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, FATAL)
    tick_until(parts, running, "FAILED")

    def attempt(_: int) -> bool:
        try:
            return bool(resume(parts.store, running.id))
        except Conflict:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert parts.store.get(running.id).attempt == 2


@pytest.mark.parametrize(
    ("analysis", "timeout", "reason"),
    [
        (helpers.failing, 60, "the analysis failed: ValueError: three is not a number of mine"),
        (helpers.dying, 60, "the analysis failed: the analysis process ended with status 7"),
        (helpers.endless, 3, "the analysis failed: the analysis took longer than 3 seconds"),
    ],
)
def test_an_analysis_that_fails(
    start: Callable[..., Services],
    ray: FakeRay,
    settings: Settings,
    analysis: Callable[..., None],
    timeout: float,
    reason: str,
):
    parts = start(Analyser(timeout, analysis))
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS)
    ray.end(ray.last)
    seen = tick_until(parts, study, "FAILED")
    assert seen.reason == reason
    assert seen.verdict is None
    assert states_of(parts, study) == [("succeeded", None)] * 16
    resume(parts.store, study.id)  # once the analysis is mended, nothing need be trained again
    after = start()
    tick_until(after, study, "RUNNING")
    ray.end(ray.last)
    assert tick_until(after, study, "COMPLETED").reason is None


def test_a_failed_analysis_does_not_undo_a_cancel(start: Callable[..., Services], ray: FakeRay, settings: Settings):
    parts = start(Analyser(30, helpers.failing))
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS[:1])
    cancel(parts.store, study.id)
    ray.end(ray.last, None, status="STOPPED")
    assert "the analysis failed" in (tick_until(parts, study, "CANCELLED").reason or "")


def test_several_studies_are_analysed_in_turn(parts: Services, ray: FakeRay, settings: Settings):
    studies = [add_study(parts.store, spec()) for _ in range(3)]
    for study in studies:
        tick_until(parts, study, "RUNNING")
        finish_packs(settings, study, PACKS)
        ray.end(submission_id(study.name, study.id, 1))
    for study in studies:
        assert tick_until(parts, study, "COMPLETED").verdict is not None


def test_storage_away(tmp_path: Path, parts: Services, study: Study, settings: Settings, ray: FakeRay):
    Path(settings.storage).parent.mkdir(exist_ok=True)
    Path(settings.storage).write_text("in the way")
    for _ in range(2):
        parts.reconciler.tick()
    seen = parts.store.get(study.id)
    assert seen.state == "QUEUED"
    assert (seen.reason or "").startswith("waiting for the storage")
    assert ray.submissions == []
    Path(settings.storage).unlink()
    assert tick_until(parts, study, "RUNNING").reason is None


def test_studies_wait_their_turn(parts: Services, ray: FakeRay):
    studies = [add_study(parts.store, spec()) for _ in range(5)]
    for _ in range(3):
        parts.reconciler.tick()
    assert [parts.store.get(s.id).state for s in studies] == ["RUNNING"] * 3 + ["QUEUED"] * 2
    assert "waiting for its turn" in (parts.store.get(studies[4].id).reason or "")
    ray.end(submission_id(studies[0].name, studies[0].id, 1), 3, FATAL)
    tick_until(parts, studies[3], "RUNNING")
    assert parts.store.get(studies[4].id).state == "QUEUED"


def test_a_study_that_cannot_be_read_does_not_hold_up_others(parts: Services, study: Study):
    broken = add_study(parts.store, spec())
    parts.store.note(broken, spec="{}")
    assert tick_until(parts, study, "RUNNING").state == "RUNNING"


def test_the_reconcilers_thread_outlives_a_broken_database(
    settings: Settings, parts: Services, study: Study, ray: FakeRay
):
    file = settings.database_url.removeprefix("sqlite:///")
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE studies RENAME TO gone")
    parts.reconciler.start()
    time.sleep(0.3)
    with sqlite3.connect(file) as connection:
        connection.execute("ALTER TABLE gone RENAME TO studies")
    deadline = time.monotonic() + 30
    while parts.store.get(study.id).state != StudyState.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sum(thread.name == "reconciler" for thread in threading.enumerate()) == 1


def test_mlflow_away_holds_nothing_up(parts: Services, running: Study, ray: FakeRay, settings: Settings):
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    done = tick_until(parts, running, "COMPLETED")
    for _ in range(5):
        parts.reconciler.tick()
    assert not parts.store.get(done.id).published
    assert parts.views.study(done).tracking == "delayed"


def test_nothing_to_publish_is_current(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, FATAL)
    assert parts.views.study(tick_until(parts, running, "FAILED")).tracking == "current"
