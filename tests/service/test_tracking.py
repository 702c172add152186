"""The verdict in MLflow, against a real server and what the driver's own tracker wrote there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from service.services import Services
from service.settings import Settings
from service.store import Study
from service.tracking import Tracking, TrackingUnavailable
from tests.mlflow_server import MlflowServer, mlflow_server
from tests.service.fake_ray import FakeRay
from tests.service.helpers import add_study, finish_packs, plan_of, services_for, settings_for, study_from, tick_until
from tests.studies import spec
from trials.ledger import Ledger
from trials.tracking import Tracker

PACKS = plan_of(spec()).packs


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


def publish_as_the_driver_does(settings: Settings, study: Study) -> None:
    ledger = Ledger(settings.study_root(study.id))
    tracker = Tracker(ledger, plan_of(spec()), spec(), study.id, settings.mlflow_url)
    tracker.start()
    assert tracker.finish()


def until_published(parts: Services, study: Study) -> Study:
    import time

    deadline = time.monotonic() + 90
    while not (seen := parts.store.get(study.id)).published:
        assert time.monotonic() < deadline
        parts.reconciler.tick()
        time.sleep(0.05)
    return seen


def test_a_study_of_which_nothing_is_published(mlflow: MlflowServer):
    assert Tracking(mlflow.url).find(study_from(spec())) is None


def test_mlflow_away():
    tracking = Tracking("http://127.0.0.1:9")
    assert not tracking.is_alive()
    with pytest.raises(TrackingUnavailable, match="does not answer"):
        tracking.find(study_from(spec()))


def test_the_verdict_reaches_the_studys_run(parts: Services, settings: Settings, ray: FakeRay):
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS)
    publish_as_the_driver_does(settings, study)
    ray.end(ray.last)
    tick_until(parts, study, "COMPLETED")
    seen = until_published(parts, study)
    shown = parts.views.study(seen)
    assert shown.tracking == "current"
    assert shown.links.mlflow_experiment is not None
    assert shown.links.mlflow_experiment.startswith(
        f"{settings.mlflow_url}/#/experiments/{seen.mlflow_experiment}/runs"
    )
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    place = Tracking(settings.mlflow_url).find(seen)
    assert place is not None
    assert place.run_id is not None
    run = client.get_run(place.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["normstudy.state"] == "COMPLETED"
    assert run.data.tags["normstudy.verdict"] == "undecided"
    assert {"verdict.json", "report.html", "results.parquet"} & {
        a.path for a in client.list_artifacts(place.run_id)
    } >= {
        "verdict.json",
        "report.html",
    }
    assert seen.ended_at is not None
    assert run.info.end_time == int(seen.ended_at.timestamp() * 1000)


def test_what_mlflow_missed_is_sent_by_a_driver_with_nothing_to_train(
    parts: Services, settings: Settings, ray: FakeRay
):
    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS)
    ray.end(ray.last)
    done = tick_until(parts, study, "COMPLETED")
    assert parts.views.study(done).tracking == "delayed"
    import time

    deadline = time.monotonic() + 60
    while len(ray.submissions) == 1:
        assert time.monotonic() < deadline
        parts.reconciler.tick()
        time.sleep(0.05)
    assert ray.last == f"smallest-{study.id}-a1-tracking1"
    assert ray.submissions[1]["entrypoint"] == ray.submissions[0]["entrypoint"] + " --only-tracking"
    publish_as_the_driver_does(settings, study)
    ray.end(ray.last)
    until_published(parts, study)
    assert len(ray.submissions) == 2


def test_a_cancelled_study_ends_as_killed_in_mlflow_even_after_an_outage(
    parts: Services, settings: Settings, ray: FakeRay, mlflow: MlflowServer
):
    from service.lifecycle import cancel

    study = add_study(parts.store, spec())
    tick_until(parts, study, "RUNNING")
    finish_packs(settings, study, PACKS[:1])
    Ledger(settings.study_root(study.id)).write_file("results.parquet", b"")
    publish_as_the_driver_does(settings, study)
    mlflow.stop()
    try:
        cancel(parts.store, study.id)
        ray.end(ray.last, None, status="STOPPED")
        done = tick_until(parts, study, "CANCELLED")
        for _ in range(3):
            parts.reconciler.tick()
        assert parts.views.study(parts.store.get(done.id)).tracking == "delayed"
    finally:
        mlflow.start()
    until_published(parts, study)
    place = Tracking(settings.mlflow_url).find(done)
    assert place is not None
    run = MlflowClient(tracking_uri=settings.mlflow_url).get_run(place.run_id or "")
    assert (run.info.status, run.data.tags["normstudy.state"]) == ("KILLED", "CANCELLED")
