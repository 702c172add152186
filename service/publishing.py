"""Hands verdicts in to MLflow, at MLflow's pace and beside everything else.

MLflow may be slow or away: each try runs in a thread of its own, one at a time, and a study
whose try failed waits longer and longer for its next. Nothing else waits for it.
"""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from service.analysing import REPORT_FILE, RESULTS_FILE, VERDICT_FILE
from service.cluster import Cluster, ClusterError, submission_id
from service.jobs import EarlierDriverAlive, Outdated, submit_driver
from service.library import Library
from service.logs import event
from service.results import STORAGE_ERRORS
from service.settings import Settings
from service.store import Store, StoreUnavailable, Study, StudyState
from service.tracking import Tracking, TrackingUnavailable

log = logging.getLogger(__name__)

_TRACKING_PAUSE = (2.0, 60.0)  # seconds between tries of one study: doubled from the first to the second
_MOST_TRACKING_JOBS = 5


class Publisher:
    """Finds studies in MLflow and, once they have ended, adds verdict and report. For one thread."""

    def __init__(self, settings: Settings, store: Store, cluster: Cluster, tracking: Tracking, library: Library):
        self._settings, self._store, self._cluster = settings, store, cluster
        self._tracking, self._library = tracking, library
        self._publication: tuple[str, Future[bool]] | None = None  # one at a time
        self._pauses: dict[str, tuple[float, float]] = {}  # study → (not before, pause)

    def look(self, studies: Iterable[Study]) -> None:
        """Take note of the try that has ended, and begin the next; never waits."""
        self._end()
        for study in studies:
            if self._publication is not None:
                return
            self._begin(study)

    def _begin(self, study: Study) -> None:
        """Start a try in a thread of its own, if the study needs one now."""
        if StudyState(study.state).has_ended:
            needed = not study.published
        else:
            needed = study.started_at is not None and study.mlflow_experiment is None
        not_before, _ = self._pauses.get(study.id, (0.0, 0.0))
        if not needed or time.monotonic() < not_before:
            return
        future: Future[bool] = Future()
        # A daemon, so that a service told to stop need not wait for MLflow's timeouts.
        threading.Thread(target=lambda: future.set_result(self._publish(study)), name="publisher", daemon=True).start()
        self._publication = (study.id, future)

    def _end(self) -> None:
        """Take note of how the last try went; after one that failed, pause for twice as long as before."""
        if self._publication is None or not self._publication[1].done():
            return
        study_id, future = self._publication
        self._publication = None
        if future.result():
            self._pauses.pop(study_id, None)
            return
        shortest, longest = _TRACKING_PAUSE
        _, pause = self._pauses.get(study_id, (0.0, shortest / 2))
        pause = min(2 * pause, longest)
        self._pauses[study_id] = (time.monotonic() + pause, pause)

    def _publish(self, study: Study) -> bool:
        """In the publishing thread. Returns whether all that could be done by now is done."""
        try:
            place = self._tracking.find(study)
            has_ended = StudyState(study.state).has_ended
            results = self._library.open(study)
            results.refresh(max_age=0)
            if has_ended and not results.is_tracked and self._send_rest(study):
                self._pauses.pop(study.id, None)  # it takes seconds: look again soon
            nothing = has_ended and not results.any_finished  # that MLflow would lack
            if place is None:
                return nothing and self._note_published(study, None)
            if study.mlflow_experiment != place.experiment_id:
                self._store.note(study, mlflow_experiment=place.experiment_id)
            if not has_ended:
                return True
            if place.run_id is None:  # the driver ended between making its experiment and its run
                return nothing and self._note_published(study, place.experiment_id)
            names = (RESULTS_FILE, VERDICT_FILE, REPORT_FILE) if study.verdict is not None else ()
            # One that was removed (as damaged, say) must not keep the others from MLflow.
            there = [name for name in names if results.ledger.has_file(name)]
            files = {name.rsplit("/", 1)[1]: results.ledger.read_file(name) for name in there}
            self._tracking.publish(study, place.run_id, files)
            if not results.is_tracked:
                return False  # the verdict is there, packs have yet to follow: look again later
            self._note_published(study, place.experiment_id)
        except (TrackingUnavailable, StoreUnavailable, ClusterError, *STORAGE_ERRORS) as error:
            event(log, "tracking delayed", study=study.id, detail=str(error))
            return False
        except Exception:
            log.exception("study %s could not be published; it will be tried again", study.id)
            return False
        return True

    def _note_published(self, study: Study, experiment: str | None) -> bool:
        if self._store.note(study, published=True):
            event(log, "published", study=study.id, experiment=experiment)
        return True

    def _send_rest(self, study: Study) -> bool:
        """MLflow was away when the study ended, or its driver died: another driver sends what MLflow lacks.

        Returns whether such a driver is under way. After some that did not help, the study stays
        `delayed`; its numbers are in the ledger.
        """
        attempt_id = submission_id(study.name, study.id, study.attempt)
        for number in range(1, _MOST_TRACKING_JOBS + 1):
            job_id = f"{attempt_id}-tracking{number}"
            job = self._cluster.job(job_id)
            if job is None:
                try:
                    submit_driver(
                        self._cluster,
                        self._settings,
                        study,
                        job_id,
                        only_tracking=True,
                        still_wanted=lambda: self._is_still(study),
                    )
                except EarlierDriverAlive:
                    return True
                except Outdated:
                    return False
                event(log, "tracking job submitted", study=study.id, job=job_id)
                return True
            if not job.status.has_ended:
                return True
        return False

    def _is_still(self, study: Study) -> bool:
        """Whether nobody has resumed the study since this thread was handed it."""
        now = self._store.get(study.id)
        return (now.state, now.attempt) == (study.state, study.attempt)
