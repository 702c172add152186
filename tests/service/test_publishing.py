"""How a study without any result ends in MLflow, against a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from service.lifecycle import cancel
from service.services import Services
from service.settings import Settings
from service.store import Study
from tests.mlflow_server import MlflowServer, mlflow_server
from tests.service.fake_ray import FakeRay
from tests.service.helpers import add_study, services_for, settings_for, tick_until
from tests.studies import spec
from trials.records import experiment_name


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def settings(tmp_path: Path, ray: FakeRay, mlflow: MlflowServer) -> Settings:
    return settings_for(tmp_path, ray_dashboard_url=ray.url, mlflow_url=mlflow.url)


@pytest.fixture
def parts(settings: Settings) -> Iterator[Services]:
    with services_for(settings) as parts:
        yield parts


def until_published(parts: Services, study: Study) -> Study:
    import time

    deadline = time.monotonic() + 90
    while not (seen := parts.store.get(study.id)).published:
        assert time.monotonic() < deadline
        parts.reconciler.tick()
        time.sleep(0.05)
    return seen


def begin(parts: Services, study: Study, mlflow: MlflowServer, *, with_run: bool) -> str | None:
    """What a driver makes in MLflow before its first pack has ended."""
    client = MlflowClient(tracking_uri=mlflow.url)
    experiment = client.create_experiment(experiment_name(study.name, study.id))
    if not with_run:
        return None
    tags = {"normstudy.role": "study", "normstudy.study_id": study.id}
    return client.create_run(experiment, tags=tags).info.run_id


@pytest.mark.parametrize(("ended", "status"), [("CANCELLED", "KILLED"), ("FAILED", "FAILED")])
def test_a_run_that_the_driver_began_is_ended(
    parts: Services, ray: FakeRay, mlflow: MlflowServer, ended: str, status: str
):
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    run_id = begin(parts, study, mlflow, with_run=True)
    if ended == "CANCELLED":
        cancel(parts.store, study.id)
        ray.end(ray.last, None, status="STOPPED")
    else:
        ray.end(ray.last, 3, "normstudy: fatal: unschedulable: no GPU\n")
    assert not tick_until(parts, study, ended).published
    until_published(parts, study)
    run = MlflowClient(tracking_uri=mlflow.url).get_run(run_id or "")
    assert (run.info.status, run.data.tags["normstudy.state"]) == (status, ended)
    assert len(ray.submissions) == 1, "no driver is needed for it"


@pytest.mark.parametrize("experiment", [True, False])
def test_where_the_driver_left_no_run_nothing_is_to_be_done(
    parts: Services, ray: FakeRay, mlflow: MlflowServer, experiment: bool
):
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    if experiment:
        begin(parts, study, mlflow, with_run=False)
    cancel(parts.store, study.id)
    ray.end(ray.last, None, status="STOPPED")
    tick_until(parts, study, "CANCELLED")
    assert parts.views.study(until_published(parts, study)).tracking == "current"
