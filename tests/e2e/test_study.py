"""The whole path, for real: POST → Ray job → Tune → training → ledger → MLflow → analysis → verdict."""

import io
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient

from service.client import Client, Refused
from tests.studies import document
from trials.table import RESULTS_SCHEMA

# Long enough that something can happen to it in the middle, short enough for a suite.
LONG: dict[str, Any] = {
    "space.normaliser": ["none", "batch_norm", "norm_like", "affine_like"],
    "space.batch_size": [4, 8, 64],
    "space.learning_rate": [0.1, 0.3, 1.0],
    "seeds": 3,
    "training.budget": {"epochs": 6},
    "model": {"width": 16},
    "hypotheses": [{"arms": ["norm_like", "affine_like"], "direction": "negative"}],
}
WAIT = 240.0


def submit(client: Client, **changes: Any) -> str:
    return client.submit(json.dumps(document(**changes)), "application/json")["id"]


def finish(client: Client, study_id: str) -> Any:
    return client.wait(study_id, pause=0.3, timeout=WAIT)


def results(client: Client, study_id: str) -> pa.Table:
    return pq.read_table(io.BytesIO(client.export(study_id, "parquet")))


def driver_of(study_id: str) -> psutil.Process:
    """The driver's own process (not the shell or supervisor around it)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "trials.driver" in command and study_id in command and "python" in Path(command[0]).name:
                return process
        time.sleep(0.1)
    raise AssertionError(f"no driver of {study_id} appeared")


def until_some_packs(client: Client, study_id: str) -> None:
    deadline = time.monotonic() + WAIT
    while client.get(study_id)["progress"]["packs_done"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> str:
    """A study that ran without anything happening to it."""
    study_id = submit(client, name="undisturbed", **LONG)
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    return study_id


def test_study_ends_with_a_verdict(client: Client, undisturbed: str):
    study = client.get(undisturbed)
    assert study["attempt"] == 1
    assert study["progress"]["trials_done"] == study["plan"]["trials"] == 4 * 3 * 3 * 3
    assert sum(study["progress"]["states"].values()) == 108
    verdict = client.analysis(undisturbed)
    assert {arm["normaliser"] for arm in verdict["arms"]} == set(LONG["space.normaliser"])
    for arm in verdict["arms"]:
        assert arm["interval"][0] <= arm["slope"] <= arm["interval"][1]
        assert arm["verdict"] in {"negative", "positive", "flat", "undecided"}
        assert (arm["n_trials"], arm["n_seeds"]) == (27, 3)
    assert [h["verdict"] for h in verdict["hypotheses"]] == [v["verdict"] for v in study["verdict"] or []]
    report = client.report(undisturbed).decode()
    assert "norm_like" in report
    assert verdict["hypotheses"][0]["sentence"] in report


def test_export_holds_the_results_table(client: Client, undisturbed: str, studies_folder: Path):
    table = results(client, undisturbed)
    assert table.schema.names == RESULTS_SCHEMA.names
    assert table.equals(pq.read_table(studies_folder / undisturbed / "analysis" / "results.parquet"))
    assert set(table["state"].to_pylist()) <= {"succeeded", "diverged"}
    listed = list(client.trials(undisturbed))
    assert [t["trial_key"] for t in listed] == table["trial_key"].to_pylist()
    assert [t["test_accuracy"] for t in listed] == table["test_accuracy"].to_pylist()
    assert (
        client.trial(undisturbed, listed[0]["trial_key"])["test_accuracy_by_epoch"]
        == (table["test_accuracy_by_epoch"].to_pylist()[0])
    )
    assert len(client.export(undisturbed, "csv").splitlines()) == 109


def test_mlflow_has_one_run_per_trial_with_the_same_numbers(client: Client, undisturbed: str, urls: dict[str, str]):
    deadline = time.monotonic() + 60
    while client.get(undisturbed)["tracking"] != "current":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    mlflow = MlflowClient(tracking_uri=urls["mlflow"])
    experiment = mlflow.get_experiment_by_name(f"undisturbed ({undisturbed})")
    assert experiment is not None
    [parent] = mlflow.search_runs([experiment.experiment_id], "tags.`normstudy.role` = 'study'")
    children = mlflow.search_runs([experiment.experiment_id], "tags.`normstudy.role` = 'trial'", max_results=1000)
    rows = {row["trial_key"]: row for row in results(client, undisturbed).to_pylist()}
    assert {run.data.tags["normstudy.trial_key"] for run in children} == set(rows)
    assert len(children) == len(rows)
    for run in children:
        row = rows[run.data.tags["normstudy.trial_key"]]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["normstudy.state"] == row["state"]
        assert run.data.metrics["test_accuracy"] == row["test_accuracy"]
        assert run.data.params["batch_size"] == str(row["batch_size"])
    artifacts = {a.path for a in mlflow.list_artifacts(parent.info.run_id)}
    assert {"spec.json", "results.parquet", "verdict.json", "report.html"} <= artifacts
    assert parent.info.status == "FINISHED"


def test_convolutions_other_optimisers_and_probes(client: Client, urls: dict[str, str]):
    changes: dict[str, Any] = {
        "model": {"kind": "cnn", "channels": [4], "activation": "relu"},
        "training": {"budget": {"updates": 60}, "schedule": {"kind": "cosine"}},
        "space.normaliser": ["none", "patch_norm"],
        "space.batch_size": [16, 64],
        "space.learning_rate": [0.01],
        "space.optimiser": ["momentum", "adamw"],
        "space.weight_decay": [0.0, 0.01],
        "probes": {"every": 1, "samples": 64},
        "hypotheses": [{"arms": ["patch_norm"], "direction": "flat"}],
    }
    study_id = submit(client, name="convolutions", **changes)
    assert finish(client, study_id)["state"] == "COMPLETED"
    rows = results(client, study_id).to_pylist()
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    assert {(row["state"], row["updates"], row["channels"]) for row in rows} == {("succeeded", 60, "4")}
    for row in rows:
        assert row["probe_updates"][0] == 0
        assert row["probe_updates"][-1] == 60
        assert [len(maps) for maps in row["probe_alignment"]] == [2] * len(row["probe_updates"])
    assert max(row["test_accuracy"] for row in rows) > 0.3
    assert "patch_norm" in client.report(study_id).decode()
    deadline = time.monotonic() + 60
    while client.get(study_id)["tracking"] != "current":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    mlflow = MlflowClient(tracking_uri=urls["mlflow"])
    experiment = mlflow.get_experiment_by_name(f"convolutions ({study_id})")
    assert experiment is not None
    run, *_ = mlflow.search_runs([experiment.experiment_id], "params.optimiser = 'adamw'")
    assert "probe_interference.1" in run.data.metrics


def test_ray_job_is_named_after_study_and_attempt(client: Client, undisturbed: str, urls: dict[str, str]):
    jobs = httpx.get(f"{urls['ray']}/api/jobs/").json()
    assert [j["status"] for j in jobs if j["submission_id"] == f"undisturbed-{undisturbed}-a1"] == ["SUCCEEDED"]


def test_data_set_is_loaded_once_and_actors_are_reused(client: Client, undisturbed: str, urls: dict[str, str]):
    log = httpx.get(f"{urls['ray']}/api/jobs/undisturbed-{undisturbed}-a1/logs").json()["logs"]
    assert log.count("data set digits loaded once") == 1
    actors = httpx.get(f"{urls['ray']}/api/v0/actors?detail=true").json()["data"]["result"]["result"]
    mine = [actor for actor in actors if actor["class_name"] == "Pack_undisturbed"]
    # One per core, and on a busy machine one more, where Tune begins it before it knows that another is free.
    packs = client.get(undisturbed)["plan"]["packs"]
    assert 1 <= len(mine) <= packs
    assert len(mine) < packs or (os.cpu_count() or 1) >= packs
    assert {actor["repr_name"] for actor in mine} == {"undisturbed"}


def test_ray_dashboard_tells_which_pack_an_actor_trains(client: Client, urls: dict[str, str]):
    # It would train for hours, so that it is still there when the dashboard looks, however fast the machine.
    study_id = submit(client, name="seen in Ray", **{**LONG, "training.budget": {"epochs": 100_000}})
    packs = re.compile(r"ray::seen in Ray/(none|batch_norm|norm_like|affine_like)-B(4|8|64)")
    summary = httpx.get(f"{urls['ray']}/nodes?view=summary").json()["data"]["summary"]
    page = f"{urls['ray']}/nodes/{summary[0]['raylet']['nodeId']}"
    deadline = time.monotonic() + 120
    try:
        while True:  # the dashboard looks at its processes every few seconds
            workers = httpx.get(page).json()["data"]["detail"]["workers"]
            if any(packs.fullmatch(" ".join(worker["cmdline"]).strip()) for worker in workers):
                return
            assert time.monotonic() < deadline, workers
            time.sleep(0.5)
    finally:
        client.cancel(study_id)
        finish(client, study_id)


@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_killed_in_the_middle_the_results_are_the_same(client: Client, undisturbed: str, victim: str):
    study_id = submit(client, name=f"killed {victim}", **LONG)
    driver = driver_of(study_id)
    until_some_packs(client, study_id)
    if victim == "driver":
        driver.kill()
    else:
        [worker, *_] = [p for p in psutil.process_iter(["cmdline"]) if f"killed {victim}/" in str(p.info["cmdline"])]
        worker.kill()
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    assert study["attempt"] == (2 if victim == "driver" else 1)
    assert results(client, study_id).equals(results(client, undisturbed))
    mine, theirs = client.analysis(study_id), client.analysis(undisturbed)
    assert mine["arms"] == theirs["arms"]


def test_cancelled_then_resumed_the_results_are_the_same(client: Client, undisturbed: str, studies_folder: Path):
    study_id = submit(client, name="cancelled", **LONG)
    until_some_packs(client, study_id)
    client.cancel(study_id)
    client.cancel(study_id)  # twice is once
    study = finish(client, study_id)
    assert study["state"] == "CANCELLED"
    done = {p.name: p.stat().st_mtime_ns for p in (studies_folder / study_id / "shards").iterdir()}
    assert 2 <= len(done) < 12
    states = {t["state"] for t in client.trials(study_id)}
    assert "cancelled" in states
    assert len(list(client.trials(study_id))) == 108
    client.resume(study_id)
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    assert results(client, study_id).equals(results(client, undisturbed))
    shards = studies_folder / study_id / "shards"
    assert {name: (shards / name).stat().st_mtime_ns for name in done} == done  # finished packs were not run again


def test_diverging_trials_are_data(client: Client):
    study_id = submit(
        client, name="diverging", **{"space.learning_rate": [0.1, 1e8], "model": {"activation": "identity"}}
    )
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    assert study["progress"]["states"]["diverged"] > 0
    for trial in client.trials(study_id):
        if trial["state"] == "diverged":
            assert trial["reason"] == "non_finite_loss"
            assert trial["learning_rate"] == 1e8
    verdict = client.analysis(study_id)
    assert verdict["counts"]["by_state"]["diverged"] == study["progress"]["states"]["diverged"]
    json.dumps(verdict, allow_nan=False)


def test_every_trial_diverges_and_the_report_still_builds(client: Client):
    changes = {"space.learning_rate": [1e8], "space.normaliser": ["none"], "model": {"activation": "identity"}}
    study_id = submit(client, name="all diverge", hypotheses=[], **changes)
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    assert study["progress"]["states"] == {"diverged": 4}
    assert b"diverged" in client.report(study_id)


def test_what_the_cluster_can_never_place_fails_with_the_reason(client: Client):
    study_id = submit(client, name="too much", resources={"gpus_per_pack": 3})
    study = finish(client, study_id)
    assert study["state"] == "FAILED"
    assert "unschedulable" in study["reason"]
    assert "3 GPU" in study["reason"]
    assert study["attempt"] == 1


def test_data_set_that_cannot_be_had_fails_with_the_reason(client: Client):
    """There is no network here; where there is one this test has nothing to say."""
    try:
        httpx.get("https://www.cs.toronto.edu", timeout=5)
        pytest.skip("there is a network, so cifar10 can be had")
    except httpx.HTTPError:
        pass
    study_id = submit(client, name="no network", **{"data.dataset": "cifar10"})
    study = finish(client, study_id)
    assert study["state"] == "FAILED"
    assert "cifar10" in study["reason"]
    assert "parquet" in study["reason"]


def test_two_studies_at_once(client: Client):
    first, second = submit(client, name="first of two"), submit(client, name="second of two", seeds=3)
    ends = [finish(client, first), finish(client, second)]
    assert [s["state"] for s in ends] == ["COMPLETED", "COMPLETED"]
    assert [s["progress"]["trials_done"] for s in ends] == [16, 24]


def test_refused_study_starts_nothing(client: Client, urls: dict[str, str]):
    before = {s["id"] for s in client.studies()}
    with pytest.raises(Refused) as caught:
        submit(client, **{"space.batch_size": [4, 5000]})
    assert "/space/batch_size/1" in str(caught.value)
    assert {s["id"] for s in client.studies()} == before


def test_service_killed_in_the_middle_changes_nothing(client: Client, undisturbed: str, stack):
    study_id = submit(client, name="service killed", **LONG)
    until_some_packs(client, study_id)
    [api] = [part for part in stack.parts if part.key == "api"]
    os.kill(api.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while api.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stack.tend()  # what `normstudy up` does every half second
    study = finish(client, study_id)
    assert study["state"] == "COMPLETED", study
    assert study["attempt"] == 1
    assert results(client, study_id).equals(results(client, undisturbed))
