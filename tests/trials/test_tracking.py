"""MLflow as a projection of the ledger, against a real server: each trial once, whatever happens."""

from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.mlflow_server import MlflowServer, mlflow_server
from tests.studies import plan, spec
from tests.trials.test_ledger import results_of
from trials.ledger import Ledger
from trials.records import PROBES, Probe, Reason, TrialResult, TrialState, experiment_name
from trials.tracking import Tracker

PROVENANCE = {"started_at": "2026-12-01T08:00:00+00:00", "seconds": 2.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "study"))


def tracker(ledger: Ledger, study_id: str, url: str, patience: float = 0.5) -> Tracker:
    return Tracker(ledger, plan(), spec(), study_id, url, patience=patience)


def runs(url: str, study_id: str, role: str):
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name(experiment_name(spec().name, study_id))
    assert experiment is not None
    return client.search_runs([experiment.experiment_id], f"tags.`normstudy.role` = '{role}'", max_results=1000)


def fill(ledger: Ledger, packs) -> None:
    for pack in packs:
        ledger.append(pack, results_of(pack), PROVENANCE)


def test_every_trial_becomes_one_run_that_compares(server: MlflowServer, ledger: Ledger):
    fill(ledger, plan().packs)
    sender = tracker(ledger, "one", server.url)
    sender.start()
    assert sender.finish()
    [parent] = runs(server.url, "one", "study")
    children = runs(server.url, "one", "trial")
    assert sorted(r.data.tags["normstudy.trial_key"] for r in children) == sorted(
        t.key for pack in plan().packs for t in pack.trials
    )
    by_key = {t.key: t for pack in plan().packs for t in pack.trials}
    for run in children:
        trial = by_key[run.data.tags["normstudy.trial_key"]]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params["learning_rate"] == str(trial.learning_rate)
        assert run.data.params["normaliser"] == trial.normaliser
        assert run.data.tags["normstudy.state"] == ("diverged" if trial.seed else "succeeded")
        assert run.info.status == "FINISHED"
        assert (run.info.end_time or 0) - run.info.start_time == 2000
        assert run.data.metrics["train_loss"] == trial.learning_rate  # the None of epoch 2 was left out
    client = MlflowClient(tracking_uri=server.url)
    history = client.get_metric_history(children[0].info.run_id, "test_accuracy")
    assert [m.step for m in history] == [1]
    assert {a.path for a in client.list_artifacts(parent.info.run_id)} == {"spec.json"}


def test_settings_become_parameters_and_probes_metrics(server: MlflowServer, ledger: Ledger):
    changes = {
        "model": {"kind": "cnn", "channels": [4, 8]},
        "training.optimiser": "momentum",
        "probes": {"every": 1, "samples": 64},
        "space.normaliser": ["none"],
        "hypotheses": [],
        "name": "convolutions",
    }
    laid = plan(**changes)
    probes = tuple(Probe(u, {name: (u + 0.5, None, i) for i, name in enumerate(PROBES)}) for u in (0, 10))
    for pack in laid.packs:
        ledger.append(pack, [replace(r, probes=probes, lanes_at_once=4) for r in results_of(pack)], PROVENANCE)
    sender = Tracker(ledger, laid, spec(**changes), "probed", server.url)
    sender.start()
    assert sender.finish()
    client = MlflowClient(tracking_uri=server.url)
    experiment = client.get_experiment_by_name(experiment_name("convolutions", "probed"))
    assert experiment is not None
    run = client.search_runs([experiment.experiment_id], "tags.`normstudy.role` = 'trial'")[0]
    given = {"channels": "4-8", "kernel": "3", "momentum": "0.9", "gain": "False", "lanes_at_once": "4"}
    assert given.items() <= run.data.params.items()
    assert {"heads", "patch", "path", "schedule_final", "synthetic", "budget_updates"}.isdisjoint(run.data.params)
    history = client.get_metric_history(run.info.run_id, "probe_alignment.0")
    assert [(m.step, m.value) for m in history] == [(0, 0.5), (10, 10.5)]
    assert run.data.metrics["probe_alignment.2"] == PROBES.index("alignment")
    assert "probe_alignment.1" not in run.data.metrics


def test_half_sent_pack_is_completed_without_a_second_run(server: MlflowServer, ledger: Ledger):
    """The driver died after some runs of a pack, and one of them was never ended."""
    first = plan().packs[0]
    fill(ledger, [first])
    sender = tracker(ledger, "two", server.url)
    sender.start()
    assert sender.finish()
    unfinished = runs(server.url, "two", "trial")[0].info.run_id
    client = MlflowClient(tracking_uri=server.url)
    client.update_run(unfinished, status="RUNNING")
    client.delete_run(runs(server.url, "two", "trial")[-1].info.run_id)
    Path(ledger.root, "tracked", f"{first.key}.json").unlink()
    fill(ledger, plan().packs)
    again = tracker(ledger, "two", server.url)
    again.start()
    assert again.finish()
    children = runs(server.url, "two", "trial")
    assert len(children) == plan().trials
    assert len({r.data.tags["normstudy.trial_key"] for r in children}) == plan().trials
    assert {r.info.status for r in children} == {"FINISHED"}
    assert len(runs(server.url, "two", "study")) == 1


def test_outage_delays_and_loses_nothing(ledger: Ledger, tmp_path: Path):
    """MLflow is away when packs end, and at the end; a later run sends everything once."""
    away = MlflowServer(tmp_path / "away")
    fill(ledger, plan().packs)
    sender = tracker(ledger, "three", away.url)
    sender.start()
    assert not sender.finish()
    assert ledger.tracked() == set()
    away.start()
    try:
        again = tracker(ledger, "three", away.url)
        again.start()
        assert again.finish()
        assert len(runs(away.url, "three", "trial")) == plan().trials
        assert ledger.tracked() == ledger.finished()
    finally:
        away.stop()


def test_run_made_twice_by_a_lost_answer_is_removed(server: MlflowServer, ledger: Ledger):
    first = plan().packs[0]
    fill(ledger, [first])
    sender = tracker(ledger, "four", server.url)
    sender.start()
    assert sender.finish()
    made = runs(server.url, "four", "trial")[0]
    client = MlflowClient(tracking_uri=server.url)
    client.create_run(made.info.experiment_id, tags=dict(made.data.tags))  # applied, but its answer never came
    Path(ledger.root, "tracked", f"{first.key}.json").unlink()
    again = tracker(ledger, "four", server.url)
    again.start()
    assert again.finish()
    children = runs(server.url, "four", "trial")
    assert len(children) == len({r.data.tags["normstudy.trial_key"] for r in children}) == len(first.trials)
    assert {r.info.status for r in children} == {"FINISHED"}


def test_lost_pack_that_was_run_again_is_corrected(server: MlflowServer, ledger: Ledger):
    first = plan().packs[0]
    gone = [TrialResult.absent(t, TrialState.LOST, Reason.WORKER_LOST) for t in first.trials]
    ledger.append(first, gone, PROVENANCE)
    sender = tracker(ledger, "five", server.url)
    sender.start()
    assert sender.finish()
    assert {r.info.status for r in runs(server.url, "five", "trial")} == {"FAILED"}
    fill(ledger, [first])
    again = tracker(ledger, "five", server.url)
    again.start()
    assert again.finish()
    children = runs(server.url, "five", "trial")
    assert len(children) == len(first.trials)
    assert {r.data.tags["normstudy.state"] for r in children} == {"succeeded", "diverged"}
    assert {r.info.status for r in children} == {"FINISHED"}
    assert all("test_loss" in r.data.metrics for r in children)
