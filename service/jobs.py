"""A study's jobs: the driver's command line, handed to the cluster, and never two at a time."""

import threading
from collections.abc import Callable

from service.cluster import STUDY_KEY, Cluster, driver_entrypoint
from service.settings import Settings
from service.store import Study
from trials.ledger import Ledger

_ONE_AT_A_TIME = threading.Lock()
"""Reconciler and publisher both submit; what one has seen must hold until it has submitted."""


class EarlierDriverAlive(Exception):
    """Another job of the study has not ended yet; it was told to."""

    def __init__(self) -> None:
        super().__init__("waiting for the last driver to end")


class Outdated(Exception):
    """The study has moved on since the caller looked; nothing of its is running."""


def submit_driver(
    cluster: Cluster,
    settings: Settings,
    study: Study,
    job_id: str,
    *,
    only_tracking: bool = False,
    still_wanted: Callable[[], bool] = lambda: True,
) -> bool:
    """Submit the study's driver as the job `job_id`; False where that job exists already.

    Two drivers of one study would train the same packs and write the same runs to MLflow twice.
    So any other job of it is stopped first, and the caller is to come again once it has ended.

    Args:
        still_wanted: asked before and after the submission. After it, because another service
            may have looked for jobs a moment before this one was there.

    Raises:
        EarlierDriverAlive, Outdated, ClusterUnavailable, JobRefused
        OSError, pyarrow.ArrowException: the study's spec.json could not be written.
    """
    entrypoint = driver_entrypoint(
        settings.driver_python,
        study_dir=settings.study_root(study.id),
        study_id=study.id,
        attempt=study.attempt,
        mlflow_url=settings.mlflow_url,
        data_roots=[str(root) for root in settings.data_roots],
        cache_dir=str(settings.cache_dir),
        only_tracking=only_tracking,
    )
    metadata = {STUDY_KEY: study.id, "normstudy_name": study.name, "normstudy_attempt": str(study.attempt)}
    with _ONE_AT_A_TIME:
        if not still_wanted():
            raise Outdated
        if stop_drivers(cluster, study.id, but=job_id):
            raise EarlierDriverAlive
        # Each time anew, from the database: the file may have been damaged since the last attempt.
        Ledger(settings.study_root(study.id)).write_file("spec.json", study.spec.encode())
        submitted = cluster.submit(job_id, entrypoint, metadata)
        if not still_wanted():
            cluster.stop(job_id)
            raise Outdated
        return submitted


def stop_drivers(cluster: Cluster, study_id: str, but: str | None = None) -> list[str]:
    """Tell the study's jobs to end, save the one named; those that have not ended yet.

    Raises:
        ClusterUnavailable
    """
    alive = [job_id for job_id in cluster.alive(study_id) if job_id != but]
    for job_id in alive:
        cluster.stop(job_id)
    return alive
