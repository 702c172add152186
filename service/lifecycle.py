"""What moves a study from state to state: requests to cancel and resume, and the reconciler.

    QUEUED ──submit──▶ RUNNING ──job ended, ledger complete──▶ ANALYSING ──▶ COMPLETED
      ▲  ╲                │ ╲── fatal, or no attempts left ──▶ ANALYSING ──▶ FAILED
      │   ╲─cancel─▶ CANCELLING ──job has ended──────────────▶ ANALYSING ──▶ CANCELLED
      ╰── next attempt ───╯           (without any finished pack, ANALYSING is skipped)

`resume` leads from each of the three ends back to QUEUED, if something is left to run.

Each step looks at what is true (the store, Ray, the ledger) and does the next thing; each is
safe to repeat, so a service that was killed between any two lines goes on where it was.
"""

import logging
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from service.analysing import Analyser, AnalysisTask, software_versions
from service.cluster import (
    Cluster,
    ClusterUnavailable,
    Job,
    JobRefused,
    JobStatus,
    submission_id,
)
from service.jobs import EarlierDriverAlive, Outdated, stop_drivers, submit_driver
from service.library import Library, no_progress
from service.logs import event
from service.problems import Conflict
from service.publishing import Publisher
from service.results import STORAGE_ERRORS, absent_as
from service.settings import Settings
from service.store import ENDED, Store, StoreUnavailable, Study, StudyState
from service.tracking import Tracking

log = logging.getLogger(__name__)

MOST_FORGOTTEN = 10
"""Attempts since the last `resume` that do not count because Ray forgot their job. Later ones do."""

STORAGE_PATIENCE_SECONDS = 60.0
"""How long a cancelled study waits for results that cannot be read, before it ends without an analysis."""


def cancel(store: Store, study_id: str) -> Study:
    """Ask a study to end; asking again is the same.

    Raises:
        StudyUnknown, Conflict
    """
    while True:
        study = store.get(study_id)
        state = StudyState(study.state)
        if state in (StudyState.CANCELLING, StudyState.CANCELLED) or study.outcome == StudyState.CANCELLED:
            return study
        if state not in (StudyState.QUEUED, StudyState.RUNNING):
            what = "is being analysed: its trials have ended" if state is StudyState.ANALYSING else f"is {state}"
            raise Conflict(f"study {study_id} {what}; only a study that is QUEUED or RUNNING can be cancelled")
        if store.transition(study_id, state, StudyState.CANCELLING, attempt=study.attempt, changes={"reason": None}):
            event(log, "cancelling", study=study_id)
            return store.get(study_id)


def resume(store: Store, library: Library, study_id: str) -> Study:
    """Queue an ended study again: it runs what is missing of its plan, and what was lost.

    A completed study too, where a shard has been damaged since, or trials of it were lost.

    Raises:
        StudyUnknown, Conflict
        LedgerError, OSError, pyarrow.ArrowException: the study's folder cannot be read.
    """
    study = store.get(study_id)
    if study.state == StudyState.COMPLETED and not library.open(study).to_run():
        raise Conflict(f"nothing is left to run of study {study_id}: each of its trials has a result")
    resumable = tuple(ENDED)
    attempt = study.attempt + 1
    changes: dict[str, Any] = {
        "attempt": attempt,
        "first_attempt": attempt,
        "forgotten": 0,
        "attempt_started_at": None,
        "reason": None,
        "outcome": None,
        "ended_at": None,
        "progress": None,
        "verdict": None,
        "published": False,
    }
    if not store.transition(study_id, resumable, StudyState.QUEUED, attempt=study.attempt, changes=changes):
        state = store.get(study_id).state
        raise Conflict(f"study {study_id} is {state}; only a study that has ended can be resumed")
    event(log, "resumed", study=study_id, attempt=attempt)
    return store.get(study_id)


class Reconciler:
    """One thread that brings every study on, and never dies of an error.

    Ray, the storage and MLflow may each be away for as long as they like: a study that needs
    them stays where it is and says so in its `reason`.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        cluster: Cluster,
        tracking: Tracking,
        library: Library,
        analyser: Analyser,
    ):
        self._settings, self._store, self._cluster = settings, store, cluster
        self._library, self._analyser = library, analyser
        self._publisher = Publisher(settings, store, cluster, tracking, library)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self._ray_is_away = ""  # why, within one tick
        self._unreadable_since: dict[str, float] = {}  # studies that are to be cancelled, by id

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look now instead of after the pause."""
        self._wake.set()

    def stop(self) -> None:
        """End within some seconds. Studies run on; the next service takes them up."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=15)
        self._analyser.close()

    def tick(self) -> None:
        """One look at every study that has something left to happen."""
        self._ray_is_away = ""
        studies = self._store.active()
        room = self._settings.max_running_studies - sum(s.state != StudyState.QUEUED for s in studies)
        for study in studies:
            if study.state == StudyState.QUEUED:
                room -= 1
                if room < 0:
                    self._tell(
                        study, f"waiting for its turn: {self._settings.max_running_studies} studies are under way"
                    )
                    continue
            self._guarded(study, self._step)
        if self._analyser.busy_with not in (None, *(study.id for study in studies)):
            self._analyser.close()  # another service on the same database was first
        self._publisher.look([*studies, *self._store.unpublished()])

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.tick()
            except StoreUnavailable as error:
                event(log, "database unavailable", level=logging.WARNING, detail=str(error))
            except Exception:
                log.exception("a look at the studies failed")
            self._wake.wait(self._settings.poll_seconds)
            self._wake.clear()

    def _guarded(self, study: Study, step: Any) -> None:
        """One study's trouble must not hold up the others."""
        try:
            step(study)
        except StoreUnavailable:
            raise
        except ClusterUnavailable as error:
            self._ray_is_away = str(error)
            self._tell(study, f"waiting for Ray at {self._settings.ray_dashboard_url}: {error}")
        except STORAGE_ERRORS as error:
            self._tell(study, f"waiting for the storage: {error}")
        except Exception:
            log.exception("study %s: a step failed; it will be tried again", study.id)

    def _step(self, study: Study) -> None:
        state = StudyState(study.state)
        if state is StudyState.ANALYSING:
            self._analyse(study)
            return
        if self._ray_is_away:  # found out a moment ago: do not wait for each study's timeout in turn
            raise ClusterUnavailable(self._ray_is_away)
        {
            StudyState.QUEUED: self._submit,
            StudyState.RUNNING: self._watch,
            StudyState.CANCELLING: self._end_job,
        }[state](study)

    # -- the job -----------------------------------------------------------------------------------

    def _submit(self, study: Study) -> None:
        job_id = submission_id(study.name, study.id, study.attempt)
        now = datetime.now(UTC)
        try:
            submitted = submit_driver(
                self._cluster,
                self._settings,
                study,
                job_id,
                still_wanted=lambda: self._store.get(study.id).attempt == study.attempt,
            )
        except Outdated:  # by another service on the same database
            return
        except EarlierDriverAlive as waiting:
            self._tell(study, str(waiting))
            return
        except JobRefused as error:
            self._conclude(study, StudyState.FAILED, f"Ray refused the study's job: {error}")
            return
        changes = {"reason": None, "attempt_started_at": now, "started_at": study.started_at or now}
        self._move(study, StudyState.RUNNING, changes, job=job_id, adopted=not submitted or None)

    def _watch(self, study: Study) -> None:
        job = self._cluster.job(submission_id(study.name, study.id, study.attempt))
        if job is not None and not job.status.has_ended:
            waits = job.status is JobStatus.PENDING
            # Ray's message adds something only where resources or an environment are waited for.
            more = job.message.strip().removeprefix("Job has not started yet.").strip()
            self._tell(study, f"Ray is starting the job. {more}".strip()[:500] if waits else None)
            return
        results = self._library.open(study)
        results.refresh(max_age=0)
        if job is None:
            self._forgotten(study, results.missing)
        elif job.fatal_reason is not None:
            self._conclude(study, StudyState.FAILED, job.fatal_reason)
        elif job.status is JobStatus.SUCCEEDED and results.missing == 0:
            self._conclude(study, StudyState.COMPLETED, None)
        else:
            self._next_attempt(study, _why(job, results.missing), results.missing)

    def _forgotten(self, study: Study, missing: int) -> None:
        """Ray's head was restarted: no fault of the study's, unless it is the study that kills Ray."""
        why = "Ray does not know the job any more (its head was restarted?)"
        if study.forgotten >= MOST_FORGOTTEN:
            self._next_attempt(study, why, missing)
            return
        reason = f"attempt {study.attempt} does not count: {why}"
        changes = {"attempt": study.attempt + 1, "forgotten": study.forgotten + 1, "attempt_started_at": None}
        self._move(study, StudyState.QUEUED, changes | {"reason": reason}, reason=reason)

    def _next_attempt(self, study: Study, why: str, missing: int) -> None:
        used, most = study.attempt - study.first_attempt + 1 - study.forgotten, self._settings.max_attempts
        if used < most:
            reason = f"attempt {used} of {most} ended: {why}"
            changes = {"attempt": study.attempt + 1, "attempt_started_at": None, "reason": reason}
            self._move(study, StudyState.QUEUED, changes, reason=reason)
        elif missing == 0:  # whatever the job died of, every trial has its row
            self._conclude(study, StudyState.COMPLETED, None)
        else:
            what = f"attempt {used} of {most} ended: {why}; {missing} of {study.packs} packs have no results"
            self._conclude(study, StudyState.FAILED, what)

    def _end_job(self, study: Study) -> None:
        if study.started_at is None and self._cluster.job(submission_id(study.name, study.id, study.attempt)):
            # The cancel came between the submission and its note: MLflow may know of the study all the same.
            self._store.note(study, started_at=datetime.now(UTC))
            study.started_at = datetime.now(UTC)
        if stop_drivers(self._cluster, study.id):
            self._tell(study, None)
            return
        self._conclude(study, StudyState.CANCELLED, None)

    # -- the end -----------------------------------------------------------------------------------

    def _conclude(self, study: Study, outcome: StudyState, reason: str | None) -> None:
        """The job is over: analyse what there is, or end at once where there is nothing."""
        try:
            results = self._library.open(study)
            results.refresh(max_age=0)
        except STORAGE_ERRORS as error:
            if outcome is not StudyState.CANCELLED:
                raise
            since = self._unreadable_since.setdefault(study.id, time.monotonic())
            if time.monotonic() - since < STORAGE_PATIENCE_SECONDS:
                raise
            del self._unreadable_since[study.id]
            # Who cancels must get rid of it, however damaged; `resume` analyses what is mended by then.
            self._finish(study, outcome, f"not analysed, as its results cannot be read: {error}", verdict=None)
            return
        self._unreadable_since.pop(study.id, None)
        if results.any_finished:
            self._move(study, StudyState.ANALYSING, {"outcome": outcome, "reason": reason}, outcome=outcome)
        else:
            self._finish(study, outcome, reason, verdict=None)

    def _analyse(self, study: Study) -> None:
        if self._analyser.busy_with is None:
            outcome = StudyState(study.outcome or StudyState.COMPLETED)
            self._analyser.start(
                AnalysisTask(
                    study_id=study.id,
                    attempt=study.attempt,
                    root=self._settings.study_root(study.id),
                    spec=study.spec,
                    facts=study.facts,
                    absent=None if outcome is StudyState.COMPLETED else absent_as(outcome),
                    provenance=_provenance(study, outcome),
                )
            )
            event(log, "analysing", study=study.id)
            return
        if self._analyser.busy_with != study.id:
            return
        result = self._analyser.poll()
        if result is None:
            return
        outcome, reason = StudyState(study.outcome or StudyState.COMPLETED), study.reason
        if result.error is not None:
            trouble = f"the analysis failed: {result.error}"
            event(log, "analysis failed", level=logging.ERROR, study=study.id, detail=result.error)
            reason = f"{reason}; {trouble}" if reason else trouble
            outcome = StudyState.FAILED if outcome is StudyState.COMPLETED else outcome
        self._finish(study, outcome, reason, result.verdict)

    def _finish(
        self, study: Study, outcome: StudyState, reason: str | None, verdict: list[dict[str, Any]] | None
    ) -> None:
        try:
            results = self._library.open(study)
            results.refresh(max_age=0)
            progress = results.progress(study)
        except STORAGE_ERRORS:
            if verdict is not None:  # the storage went away this moment: it is analysed again once it is back
                raise
            progress = no_progress(study)
        progress |= {"trials_per_second": None, "seconds_left": None}
        changes = {
            "reason": reason,
            "outcome": outcome,
            "verdict": verdict,
            "ended_at": datetime.now(UTC),
            "progress": progress,
            "published": study.started_at is None,  # no job was ever submitted: MLflow has nothing to end
        }
        self._move(study, outcome, changes, reason=reason)

    def _move(self, study: Study, after: StudyState, changes: Mapping[str, Any], **told: Any) -> None:
        """Compare-and-set from the state that was seen; a cancel that came in between wins."""
        if self._store.transition(study.id, StudyState(study.state), after, attempt=study.attempt, changes=changes):
            event(log, "state", study=study.id, attempt=study.attempt, before=study.state, after=after, **told)
            self.wake()

    def _tell(self, study: Study, reason: str | None) -> None:
        """Say why the study waits; an old reason of a QUEUED study (its last attempt's end) may stay."""
        if study.reason != reason and self._store.note(study, reason=reason):
            study.reason = reason
            if reason:
                event(log, "waiting", study=study.id, state=study.state, reason=reason)


def _why(job: Job, missing: int) -> str:
    if job.status is JobStatus.SUCCEEDED:
        return f"the driver ended as if all was done, but {missing} packs have no results"
    return job.summary


def _provenance(study: Study, outcome: StudyState) -> dict[str, Any]:
    """What the report says of its own origin."""
    return {
        "study_id": study.id,
        "state": str(outcome),
        "reason": study.reason,
        "attempt": study.attempt,
        "spec_hash": study.spec_hash,
        "created_at": study.created_at.isoformat(),
        "started_at": study.started_at.isoformat() if study.started_at else None,
        "software": software_versions(),
    }
