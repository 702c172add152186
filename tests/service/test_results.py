"""Trials, progress and exports, through the API and in the library."""

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from service.analysing import ATTEMPT_KEY, RESULTS_FILE
from service.cluster import submission_id
from service.results import SCALAR_COLUMNS, StudyResults, plain
from service.settings import Settings
from service.store import Study
from service.views import TrialView
from tests.service.conftest import Serve
from tests.service.fake_ray import FakeRay
from tests.service.helpers import finish_packs, plan_of, settings_for, study_from
from tests.studies import SMALLEST, spec
from trials.ledger import Ledger
from trials.records import METRICS, PROBES, Probe, Reason, TrialResult, TrialState
from trials.table import CURVE_COLUMNS, PROBE_COLUMNS, RESULTS_SCHEMA, results_table

PACKS = plan_of(spec()).packs


class Case:
    """A study behind the API, whose job and trials are in the test's hands."""

    def __init__(self, client: httpx.Client, settings: Settings, ray: FakeRay):
        self.client, self.settings, self.ray = client, settings, ray
        self.id = client.post("/v1/studies", json=SMALLEST).json()["id"]
        self.study = study_from(spec())
        self.study.id = self.id

    def get(self, path: str = "", **parameters: object) -> httpx.Response:
        return self.client.get(f"/v1/studies/{self.id}{path}", params=parameters)  # pyright: ignore[reportArgumentType]

    def until(self, *states: str) -> dict:
        import time

        deadline = time.monotonic() + 60
        while (study := self.get().json())["state"] not in states:
            assert time.monotonic() < deadline, study
            time.sleep(0.05)
        return study

    def finish(self, first: int, last: int) -> None:
        finish_packs(self.settings, self.study, PACKS[first:last])

    def end(self, exit_code: int = 0, log: str = "") -> None:
        self.ray.end(submission_id("smallest", self.id, 1), exit_code, log)


@pytest.fixture
def case(serve: Serve, ray: FakeRay, tmp_path: Path) -> Case:
    settings = settings_for(tmp_path, ray_dashboard_url=ray.url)
    made = Case(serve(settings), settings, ray)
    made.until("RUNNING")
    return made


def test_a_running_study_shows_what_has_ended(case: Case):
    assert case.get("/trials").json() == {"items": [], "next_page_token": None}
    assert case.get().json()["progress"]["trials_per_second"] is None
    case.finish(1, 3)
    import time

    time.sleep(0.6)  # the folder is listed at most twice a second
    progress = case.get().json()["progress"]
    assert (progress["trials_done"], progress["packs_done"], progress["packs_total"]) == (8, 2, 4)
    assert progress["states"] == {"succeeded": 8}
    assert progress["trials_per_second"] > 0
    assert progress["seconds_left"] is not None
    assert case.get().json()["tracking"] == "delayed"
    rows = case.get("/trials").json()["items"]
    assert [row["trial_key"] for row in rows] == [t.key for pack in PACKS[1:3] for t in pack.trials]
    assert rows[0].keys() == set(SCALAR_COLUMNS)
    assert case.get("/trials/" + PACKS[0].trials[0].key).status_code == 404
    trial = case.get("/trials/" + PACKS[1].trials[2].key).json()
    assert trial.keys() == set(RESULTS_SCHEMA.names)
    assert trial["test_accuracy_by_epoch"][-1] == trial["test_accuracy"]
    for path in ("/analysis", "/report.html"):
        assert case.get(path).status_code == 409
    assert pa_csv.read_csv(io.BytesIO(case.get("/export").content)).num_rows == 8


def pages(case: Case, **filters: object) -> list[str]:
    keys, token = [], None
    while True:
        page = case.get("/trials", page_size=3, **filters, **({"page_token": token} if token else {})).json()
        assert len(page["items"]) <= 3
        keys += [row["trial_key"] for row in page["items"]]
        token = page["next_page_token"]
        if token is None:
            return keys


def test_trials_page_in_the_plans_order_whether_running_or_ended(case: Case):
    everything = [t for pack in PACKS for t in pack.trials]
    case.finish(0, 4)
    import time

    time.sleep(0.6)
    for _ in ("running", "ended"):
        assert pages(case) == [t.key for t in everything]
        assert pages(case, normaliser="norm_like") == [t.key for t in everything if t.normaliser == "norm_like"]
        assert pages(case, state="succeeded", normaliser="none") == [
            t.key for t in everything if t.normaliser == "none"
        ]
        assert pages(case, state="diverged") == []
        case.end()
        case.until("COMPLETED")


def test_an_ended_study_shows_every_planned_trial(case: Case):
    case.finish(0, 1)
    case.end(3, "normstudy: fatal: the data set is gone\n")
    study = case.until("FAILED")
    assert study["reason"] == "the data set is gone"
    assert study["verdict"] == [{"hypothesis": 0, "verdict": "undecided"}]
    rows = case.get("/trials", page_size=500).json()["items"]
    assert [(r["state"], r["reason"]) for r in rows] == [("succeeded", None)] * 4 + [("lost", "study_failed")] * 12
    assert len(pages(case, state="lost")) == 12
    gone = case.get("/trials/" + PACKS[3].trials[0].key).json()
    assert (gone["state"], gone["test_accuracy"], gone["test_accuracy_by_epoch"]) == ("lost", None, [])
    assert case.get("/trials/nonsense").status_code == 404
    assert case.get("/analysis").json() == {"schema": 1}
    report = case.get("/report.html")
    assert report.headers["content-type"] == "text/html; charset=utf-8"

    csv = case.get("/export", format="csv")
    assert csv.headers["content-type"].startswith("text/csv")
    assert f'filename="smallest-{case.id}.csv"' in csv.headers["content-disposition"]
    table = pa_csv.read_csv(io.BytesIO(csv.content))
    assert table.column_names == list(SCALAR_COLUMNS)
    assert table.column("trial_key").to_pylist() == [t.key for pack in PACKS for t in pack.trials]
    parquet = pq.read_table(io.BytesIO(case.get("/export", format="parquet").content))
    expected = Ledger(case.settings.study_root(case.id)).table(
        plan_of(spec()), absent=(TrialState.LOST, Reason.STUDY_FAILED)
    )
    assert parquet.equals(expected)


def test_a_study_without_any_trial_has_no_analysis(case: Case):
    case.end(3, "normstudy: fatal: nothing works\n")
    case.until("FAILED")
    for path in ("/analysis", "/report.html"):
        answer = case.get(path)
        assert answer.status_code == 404
        assert "nothing works" in answer.json()["detail"]
    assert len(pages(case)) == 16
    assert pa_csv.read_csv(io.BytesIO(case.get("/export").content)).num_rows == 16


def test_cancel_and_resume_through_the_api(case: Case):
    case.finish(0, 2)
    answer = case.client.post(f"/v1/studies/{case.id}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "CANCELLING")
    assert case.client.post(f"/v1/studies/{case.id}/resume").status_code == 409
    case.ray.end(submission_id("smallest", case.id, 1), None, status="STOPPED")
    case.until("CANCELLED")
    assert case.client.post(f"/v1/studies/{case.id}/cancel").status_code == 202
    assert len(pages(case, state="cancelled")) == 8
    resumed = case.client.post(f"/v1/studies/{case.id}/resume")
    assert resumed.status_code == 202
    assert resumed.json()["attempt"] == 2
    assert case.client.post(f"/v1/studies/{case.id}/resume").status_code == 409
    case.until("RUNNING")
    assert case.get().json()["links"]["ray_job"].endswith(f"/#/jobs/smallest-{case.id}-a2")
    case.finish(2, 4)
    case.ray.end(submission_id("smallest", case.id, 2))
    case.until("COMPLETED")
    assert case.client.post(f"/v1/studies/{case.id}/cancel").status_code == 409
    assert pages(case, state="cancelled") == []


def test_the_service_survives_a_restart_with_all_it_knew(case: Case, serve: Serve):
    case.finish(0, 4)
    case.end()
    before = case.until("COMPLETED")
    again = serve(case.settings)
    assert again.get(f"/v1/studies/{case.id}").json() == before


# -- damage -----------------------------------------------------------------------------------------


def refused(case: Case) -> str:
    """Every way to the rows is a 503 that says the same."""
    details = set()
    for path in ("/trials", "/trials/" + PACKS[0].trials[0].key, "/export?format=csv", "/export?format=parquet"):
        answer = case.client.get(f"/v1/studies/{case.id}{path}")
        assert answer.status_code == 503, path
        details.add(answer.json()["detail"])
    assert len(details) == 1
    return details.pop()


def test_an_ended_studys_rows_are_those_that_were_analysed(case: Case):
    """Whatever befalls the shards afterwards."""
    case.finish(0, 4)
    case.end()
    case.until("COMPLETED")
    expected = Ledger(case.settings.study_root(case.id)).table(plan_of(spec()))
    shards = Path(case.settings.study_root(case.id), "shards")
    for shard in shards.iterdir():
        shard.write_bytes(b"junk")
    assert len(pages(case, state="succeeded")) == 16
    assert pq.read_table(io.BytesIO(case.get("/export", format="parquet").content)).equals(expected)
    assert pa_csv.read_csv(io.BytesIO(case.get("/export").content)).column("state").to_pylist() == ["succeeded"] * 16
    row = expected.slice(5, 1).to_pylist()[0]
    assert case.get("/trials/" + row["trial_key"]).json() == row
    assert case.client.post(f"/v1/studies/{case.id}/resume").status_code == 202, "the shards can be made again"


def test_rows_that_contradict_the_counts_are_not_shown(case: Case):
    case.finish(0, 4)
    case.end()
    case.until("COMPLETED")
    Path(case.settings.study_root(case.id), RESULTS_FILE).unlink()
    Path(case.settings.study_root(case.id), "shards", f"{PACKS[1].key}.parquet").unlink()
    said = refused(case)
    assert "results.parquet" in said
    assert "3 readable of 4" in said
    assert "resume" in said
    assert case.get().json()["progress"]["states"] == {"succeeded": 16}


@pytest.mark.parametrize("content", ["junk", "nothing", "half", "another table"])
def test_a_damaged_table_is_503(case: Case, content: str):
    case.finish(0, 4)
    case.end()
    case.until("COMPLETED")
    file = Path(case.settings.study_root(case.id), RESULTS_FILE)
    if content == "another table":
        pq.write_table(pq.read_table(file).slice(0, 3), file)
    else:
        whole = file.read_bytes()
        file.write_bytes({"junk": b"PAR1 junk PAR1", "nothing": b"", "half": whole[:300] + whole[-300:]}[content])
    assert "results.parquet" in refused(case)
    file.unlink()
    assert len(pages(case)) == 16, "the shards still hold what was counted"


@pytest.mark.parametrize("damage", ["a file in place of its shards", "its spec in the database"])
def test_one_damaged_study_does_not_break_the_list_or_the_others(serve: Serve, tmp_path: Path, damage: str):
    settings = settings_for(tmp_path)  # Ray is away: they stay QUEUED, so that progress is read from the ledger
    client = serve(settings)
    bad, good = (client.post("/v1/studies", json=SMALLEST).json()["id"] for _ in range(2))
    if damage.startswith("a file"):
        Path(settings.study_root(bad)).mkdir(parents=True)
        Path(settings.study_root(bad), "shards").write_text("in the way")
    else:
        import sqlite3

        with sqlite3.connect(tmp_path / "normstudy.db") as connection:
            connection.execute("UPDATE studies SET spec = '{' WHERE id = ?", [bad])
        client = serve(settings)
    import time

    time.sleep(0.6)  # the folder is listed at most twice a second
    items = {item["id"]: item for item in client.get("/v1/studies").json()["items"]}
    assert "cannot be read" in items[bad]["reason"]
    assert items[bad]["progress"]["trials_total"] == 16
    assert "cannot be read" not in (items[good]["reason"] or "")
    assert client.get(f"/v1/studies/{bad}").status_code == 200
    assert client.get(f"/v1/studies/{bad}/trials").status_code == 503
    assert client.get(f"/v1/studies/{good}/trials").status_code == 200
    for study_id in (bad, good):
        assert client.post(f"/v1/studies/{study_id}/cancel").status_code == 202


# -- in the library ----------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> tuple[StudyResults, Study, Settings]:
    settings = settings_for(tmp_path)
    study = study_from(spec())
    study.state = "RUNNING"
    return StudyResults(study, settings.study_root(study.id)), study, settings


def test_a_damaged_shard_does_not_count(results: tuple[StudyResults, Study, Settings]):
    found, study, settings = results
    finish_packs(settings, study, PACKS[:2])
    found.refresh(0)
    assert found.progress(study)["packs_done"] == 2
    shard = Path(settings.study_root(study.id), "shards", f"{PACKS[0].key}.parquet")
    shard.write_bytes(shard.read_bytes()[:-20])
    found.refresh(0)
    assert found.progress(study)["packs_done"] == 1
    assert found.missing == 3


def test_the_rate_is_that_of_this_attempt(results: tuple[StudyResults, Study, Settings]):
    import os

    found, study, settings = results
    finish_packs(settings, study, PACKS[:3])
    began = datetime(2026, 12, 1, 12, tzinfo=UTC)
    study.attempt_started_at = began
    for pack, seconds in zip(PACKS, (-100, 10, 20), strict=False):
        shard = Path(settings.study_root(study.id), "shards", f"{pack.key}.parquet")
        moment = began.timestamp() + seconds
        os.utime(shard, (moment, moment))
    found.refresh(0)
    progress = found.progress(study, now=began + timedelta(seconds=21))
    assert progress["trials_done"] == 12
    assert progress["trials_per_second"] == pytest.approx(8 / 20)
    assert 0 < progress["seconds_left"] < 20
    later = found.progress(study, now=began + timedelta(seconds=1000))
    assert later["seconds_left"] == 0, "it is late, and never below nought"


def test_the_table_of_an_earlier_attempt_is_not_shown(results: tuple[StudyResults, Study, Settings]):
    found, study, settings = results
    sink = io.BytesIO()
    before = found.ledger.table(found.plan, absent=(TrialState.LOST, Reason.STUDY_FAILED))
    pq.write_table(before.replace_schema_metadata({ATTEMPT_KEY: "1"}), sink)
    found.ledger.write_file(RESULTS_FILE, sink.getvalue())
    finish_packs(settings, study, PACKS)
    study.state = "FAILED"
    assert {row["state"] for _, row in found.rows(study, 100)} == {"lost"}, "the table that was analysed"
    study.attempt, study.state = 2, "FAILED"  # resumed, trained, and its analysis broke off
    assert {row["state"] for _, row in found.rows(study, 100)} == {"succeeded"}


def test_the_table_of_the_first_release_is_shown_as_one_of_today(results: tuple[StudyResults, Study, Settings]):
    """A study that ended before an upgrade: its table lacks the columns that came later."""
    found, study, settings = results
    finish_packs(settings, study, PACKS)
    today = found.ledger.table(found.plan)
    old = today.select(RESULTS_SCHEMA.names[: RESULTS_SCHEMA.get_field_index("budget_updates")])
    sink = io.BytesIO()
    pq.write_table(old.replace_schema_metadata({ATTEMPT_KEY: str(study.attempt)}), sink)
    found.ledger.write_file(RESULTS_FILE, sink.getvalue())
    study.state = "COMPLETED"
    rows = [row for _, row in found.rows(study, 100)]
    expected = [{name: row[name] for name in SCALAR_COLUMNS} for row in today.to_pylist()]
    assert rows == expected
    assert found.row(study, rows[-1]["trial_key"]) == plain(today.to_pylist()[-1])
    exported = io.BytesIO()
    found.parquet(study, exported)
    assert pq.read_table(exported).equals(today)


def test_numbers_that_json_lacks_become_null():
    nan, infinity = float("nan"), float("inf")
    assert plain({"a": nan, "b": [1.0, -infinity, None], "c": "nan"}) == {"a": None, "b": [1.0, None, None], "c": "nan"}
    assert plain({"d": [[infinity, 1.0], []]}) == {"d": [[None, 1.0], []]}


def test_a_listing_has_one_value_per_column():
    lists = {field.name for field in RESULTS_SCHEMA if pa.types.is_list(field.type)}
    assert lists == {*CURVE_COLUMNS, *PROBE_COLUMNS}
    assert lists.isdisjoint(SCALAR_COLUMNS)
    assert lists | set(SCALAR_COLUMNS) == set(RESULTS_SCHEMA.names)


def test_a_trial_is_shown_with_its_probes():
    (trial, *_) = PACKS[0].trials
    probes = (Probe(0, dict.fromkeys(PROBES, (1.5, None))), Probe(8, dict.fromkeys(PROBES, (2.5, None))))
    curves: dict[str, tuple[float | None, ...]] = dict.fromkeys(METRICS, (0.5,))
    result = TrialResult(trial, TrialState.SUCCEEDED, None, 1, 8, 512, 0.1, curves, probes, lanes_at_once=2)
    row = results_table([PACKS[0].key], [result]).to_pylist()[0]
    shown = json.loads(TrialView(**plain(row)).model_dump_json())
    assert (shown["gain"], shown["lanes_at_once"], shown["probe_updates"]) == (False, 2, [0, 8])
    assert shown["probe_alignment"] == [[1.5, None], [2.5, None]]
