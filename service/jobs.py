"""A study's job: the driver's command line, handed to the cluster."""

from service.cluster import Cluster, driver_entrypoint
from service.settings import Settings
from service.store import Study


def submit_driver(
    cluster: Cluster, settings: Settings, study: Study, job_id: str, *, only_tracking: bool = False
) -> bool:
    """Submit the study's driver as the job `job_id`; False where that job exists already.

    Raises:
        ClusterUnavailable, JobRefused
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
    metadata = {"normstudy_study": study.id, "normstudy_name": study.name, "normstudy_attempt": str(study.attempt)}
    return cluster.submit(job_id, entrypoint, metadata)
