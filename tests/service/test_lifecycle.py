"""The reconciler, look by look, against a Jobs API that does as the test says."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from service import lifecycle
from service.analysing import Analyser
from service.cluster import submission_id
from service.jobs import Outdated, submit_driver
from service.lifecycle import MOST_FORGOTTEN, cancel, resume
from service.problems import Conflict
from service.services import Services
from service.settings import Settings
from service.store import Study, StudyState, StudyUnknown
from tests.service import helpers
from tests.service.fake_ray import FakeRay
from tests.service.helpers import add_study, finish_packs, plan_of, services_for, settings_for, tick_until
from tests.studies import spec
from trials.ledger import Ledger
from trials.records import Reason, TrialResult, TrialState

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
    seen = resume(parts.store, parts.library, running.id)
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
        resume(parts.store, parts.library, study.id)


def test_of_several_resumes_one_wins(parts: Services, running: Study, ray: FakeRay):
    ray.end(ray.last, 3, FATAL)
    tick_until(parts, running, "FAILED")

    def attempt(_: int) -> bool:
        try:
            return bool(resume(parts.store, parts.library, running.id))
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
    resume(parts.store, parts.library, study.id)  # once the analysis is mended, nothing need be trained again
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


def test_a_study_without_a_job_is_no_matter_for_mlflow(parts: Services, study: Study, ray: FakeRay):
    cancel(parts.store, study.id)
    assert parts.views.study(tick_until(parts, study, "CANCELLED")).tracking == "current"


@pytest.mark.parametrize("moment", ["running", "in the middle of the submission"])
def test_a_study_whose_driver_may_have_reached_mlflow_is_looked_for_there(
    parts: Services, study: Study, ray: FakeRay, moment: str
):
    if moment == "running":
        tick_until(parts, study, "RUNNING")
        cancel(parts.store, study.id)
    else:
        ray.on_submit = lambda: cancel(parts.store, study.id) and None
        parts.reconciler.tick()
    ray.end(ray.last, None, status="STOPPED")
    ended = tick_until(parts, study, "CANCELLED")
    assert not ended.published
    assert parts.views.study(ended).tracking == "delayed"


# -- one driver at a time ----------------------------------------------------------------------------


@pytest.fixture
def failed(parts: Services, running: Study, ray: FakeRay, settings: Settings) -> Study:
    finish_packs(settings, running, PACKS[:1])
    ray.end(ray.last, 3, FATAL)
    return tick_until(parts, running, "FAILED")


def test_a_resumed_study_waits_for_the_driver_that_only_tracks(parts: Services, failed: Study, ray: FakeRay):
    tracking = f"{submission_id(failed.name, failed.id, 1)}-tracking1"
    parts.cluster.submit(tracking, "true", {"normstudy_study": failed.id})
    resume(parts.store, parts.library, failed.id)
    for _ in range(3):
        parts.reconciler.tick()
    seen = parts.store.get(failed.id)
    assert (seen.state, seen.reason) == ("QUEUED", "waiting for the last driver to end")
    assert set(ray.stops) == {tracking}
    assert ray.last == tracking, "no driver was started beside it"
    ray.end(tracking, None, status="STOPPED")
    assert tick_until(parts, failed, "RUNNING").reason is None
    assert ray.last.endswith("-a2")


def test_jobs_of_other_studies_are_left_alone(parts: Services, study: Study, ray: FakeRay):
    other = add_study(parts.store, spec())
    tick_until(parts, other, "RUNNING")
    tick_until(parts, study, "RUNNING")
    cancel(parts.store, study.id)
    parts.reconciler.tick()
    assert set(ray.stops) == {submission_id(study.name, study.id, 1)}


def test_a_cancel_stops_every_driver_of_the_study(parts: Services, failed: Study, ray: FakeRay):
    parts.cluster.submit("by-another-name", "true", {"normstudy_study": failed.id})
    resume(parts.store, parts.library, failed.id)
    cancel(parts.store, failed.id)
    parts.reconciler.tick()
    assert parts.store.get(failed.id).state == "CANCELLING"
    assert ray.stops == ["by-another-name"]
    ray.end("by-another-name", None, status="STOPPED")
    tick_until(parts, failed, "CANCELLED")


def test_a_driver_that_only_tracks_is_not_begun_for_a_study_that_was_resumed(
    parts: Services, failed: Study, ray: FakeRay, settings: Settings
):
    """The publishing thread has looked at the study before; the resume comes before, or within, its submission."""
    job_id, counts = f"{submission_id(failed.name, failed.id, 1)}-tracking1", len(ray.submissions)

    def is_failed() -> bool:
        return parts.store.get(failed.id).state == "FAILED"

    def send() -> None:
        submit_driver(parts.cluster, settings, failed, job_id, only_tracking=True, still_wanted=is_failed)

    ray.on_submit = lambda: resume(parts.store, parts.library, failed.id) and None
    with pytest.raises(Outdated):
        send()
    assert ray.stops == [job_id]
    with pytest.raises(Outdated):
        send()
    assert len(ray.submissions) == counts + 1


def test_the_spec_is_written_before_every_submission(parts: Services, failed: Study, ray: FakeRay, settings: Settings):
    ledger = Ledger(settings.study_root(failed.id))
    ledger.write_file("spec.json", b"{")
    resume(parts.store, parts.library, failed.id)
    tick_until(parts, failed, "RUNNING")
    assert ledger.read_file("spec.json").decode() == failed.spec


# -- attempts that do not count, and resuming what is complete ---------------------------------------


def test_attempts_that_ray_forgot_do_not_count_but_are_bounded(parts: Services, running: Study, ray: FakeRay):
    def forgotten() -> Study:
        ray.jobs.clear()
        return tick_until(parts, running, "QUEUED", "FAILED")

    for _ in range(MOST_FORGOTTEN):
        assert "does not count" in (forgotten().reason or "")
        tick_until(parts, running, "RUNNING")
    for used in (1, 2):
        assert f"attempt {used} of 3" in (forgotten().reason or "")
        tick_until(parts, running, "RUNNING")
    seen = forgotten()
    assert (seen.state, seen.attempt) == ("FAILED", MOST_FORGOTTEN + 3)
    assert "attempt 3 of 3" in (seen.reason or "")
    assert resume(parts.store, parts.library, running.id).forgotten == 0


def test_a_complete_study_is_resumed_only_if_something_is_left_to_run(
    parts: Services, running: Study, ray: FakeRay, settings: Settings
):
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    tick_until(parts, running, "COMPLETED")
    with pytest.raises(Conflict, match="nothing is left to run"):
        resume(parts.store, parts.library, running.id)
    Path(settings.study_root(running.id), "shards", f"{PACKS[2].key}.parquet").write_bytes(b"PAR1")
    assert resume(parts.store, parts.library, running.id).state == "QUEUED"
    tick_until(parts, running, "RUNNING")
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    assert tick_until(parts, running, "COMPLETED").attempt == 2


def test_a_complete_study_with_lost_trials_is_resumed(
    parts: Services, running: Study, ray: FakeRay, settings: Settings
):
    finish_packs(settings, running, PACKS[1:])
    lost = [TrialResult.absent(trial, TrialState.LOST, Reason.STUDY_FAILED) for trial in PACKS[0].trials]
    Ledger(settings.study_root(running.id)).append(PACKS[0], lost, {})
    ray.end(ray.last)
    tick_until(parts, running, "COMPLETED")
    assert resume(parts.store, parts.library, running.id).state == "QUEUED"


# -- damage --------------------------------------------------------------------------------------------


def test_a_damaged_study_can_be_cancelled(
    parts: Services, running: Study, ray: FakeRay, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    ray.end(ray.last, 1, "oh")
    shards = Path(settings.study_root(running.id), "shards")
    shards.write_text("in the way")
    for _ in range(3):
        parts.reconciler.tick()
    assert "waiting for the storage" in (parts.store.get(running.id).reason or "")
    shown = parts.views.item(parts.store.get(running.id))
    assert "cannot be read" in (shown.reason or "")
    cancel(parts.store, running.id)
    parts.reconciler.tick()
    assert parts.store.get(running.id).state == "CANCELLING", "the storage may come back"
    monkeypatch.setattr(lifecycle, "STORAGE_PATIENCE_SECONDS", 0.0)
    ended = tick_until(parts, running, "CANCELLED")
    assert "not analysed" in (ended.reason or "")
    assert ended.progress is not None
    assert ended.progress["trials_done"] == 0


def test_an_analysis_that_cannot_read_the_shards_ends_the_study(
    parts: Services, running: Study, ray: FakeRay, settings: Settings, start: Callable[..., Services]
):
    finish_packs(settings, running, PACKS)
    ray.end(ray.last)
    tick_until(parts, running, "ANALYSING")
    shards = Path(settings.study_root(running.id), "shards")
    shards.rename(shards.with_name("away"))
    shards.write_text("in the way")
    ended = tick_until(start(Analyser(60, helpers.failing)), running, "FAILED")
    assert "the analysis failed" in (ended.reason or "")
