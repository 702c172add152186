"""The ledger: a shard is there whole or not at all, and rows do not depend on how often a pack ran."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.studies import plan
from trials.ledger import Ledger, LedgerError
from trials.records import METRICS, PROBES, Pack, Probe, Reason, TrialResult, TrialState
from trials.table import RESULTS_SCHEMA

ABSENT = (TrialState.CANCELLED, Reason.STUDY_CANCELLED)


def results_of(pack: Pack) -> list[TrialResult]:
    """Results that differ from trial to trial, some diverged, with a gap in a curve."""
    return [
        TrialResult(
            config=trial,
            state=TrialState.DIVERGED if trial.seed else TrialState.SUCCEEDED,
            reason=Reason.NON_FINITE_LOSS if trial.seed else None,
            epochs_completed=2,
            updates=20,
            samples=1280,
            chance_accuracy=0.1,
            curves={metric: (trial.learning_rate / (index + 1), None) for index, metric in enumerate(METRICS)},
        )
        for trial in pack.trials
    ]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "study"))


def test_table_is_in_the_plans_order_whatever_order_packs_ended_in(ledger: Ledger):
    laid = plan()
    for pack in reversed(laid.packs):
        ledger.append(pack, results_of(pack), {"seconds": 1.0})
    table = ledger.table(laid)
    assert table.schema == RESULTS_SCHEMA
    assert table["trial_key"].to_pylist() == [t.key for pack in laid.packs for t in pack.trials]
    assert table["test_accuracy"].to_pylist() == [None] * laid.trials
    assert table["test_accuracy_by_epoch"].to_pylist()[0] == [laid.packs[0].trials[0].learning_rate / 5, None]
    assert ledger.missing(laid) == []


def test_absent_trials_get_a_row_that_says_why(ledger: Ledger):
    laid = plan()
    ledger.append(laid.packs[1], results_of(laid.packs[1]), {})
    assert ledger.table(laid).num_rows == len(laid.packs[1].trials)
    table = ledger.table(laid, ABSENT)
    assert table.num_rows == laid.trials
    done = {trial.key for trial in laid.packs[1].trials}
    absent = [row for row in table.to_pylist() if row["trial_key"] not in done]
    assert {(row["state"], row["reason"]) for row in absent} == {("cancelled", "study_cancelled")}


def test_provenance_stays_out_of_the_rows(ledger: Ledger, tmp_path: Path):
    pack, other = plan().packs[0], Ledger(str(tmp_path / "other"))
    ledger.append(pack, results_of(pack), {"seconds": 1.5, "host": "a"})
    other.append(pack, results_of(pack), {"seconds": 2.5, "host": "b"})
    assert ledger.shard(pack.key).equals(other.shard(pack.key), check_metadata=True)
    assert ledger.provenance(pack.key) == {"seconds": 1.5, "host": "a"}


def test_late_duplicate_is_dropped(ledger: Ledger):
    pack = plan().packs[0]
    ledger.append(pack, results_of(pack), {"attempt": 1})
    ledger.append(
        pack, [TrialResult.absent(t, TrialState.LOST, Reason.WORKER_LOST) for t in pack.trials], {"attempt": 2}
    )
    assert ledger.provenance(pack.key) == {"attempt": 1}
    assert set(ledger.shard(pack.key)["state"].to_pylist()) == {"succeeded", "diverged"}


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_shard_counts_as_missing_and_is_replaced(ledger: Ledger, tmp_path: Path, keep: int):
    laid = plan()
    pack = laid.packs[0]
    ledger.append(pack, results_of(pack), {})
    assert ledger.finished() == {pack.key}
    file = tmp_path / "study" / "shards" / f"{pack.key}.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert ledger.finished() == set()
    assert pack in ledger.missing(laid)
    with pytest.raises(LedgerError, match=pack.key):
        ledger.shard(pack.key)
    ledger.append(pack, results_of(pack), {})
    assert file.read_bytes() == whole


def test_damage_inside_a_shard_is_noticed(ledger: Ledger, tmp_path: Path):
    pack = plan().packs[0]
    ledger.append(pack, results_of(pack), {})
    file = tmp_path / "study" / "shards" / f"{pack.key}.parquet"
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    assert ledger.finished() == set()


def test_leftover_temporary_files_are_ignored(ledger: Ledger, tmp_path: Path):
    pack = plan().packs[0]
    ledger.append(pack, results_of(pack), {})
    (tmp_path / "study" / "shards" / f".{pack.key}.parquet.abc.tmp").write_bytes(b"half")
    (tmp_path / "study" / "shards" / "notes.txt").write_text("x")
    assert ledger.finished() == {pack.key}


def test_results_of_another_pack_are_refused(ledger: Ledger):
    first, second = plan().packs[:2]
    with pytest.raises(LedgerError, match=first.label):
        ledger.append(first, results_of(second), {})
    with pytest.raises(LedgerError):
        ledger.append(first, results_of(first)[1:], {})
    assert ledger.finished() == set()


def _append_all(root: str) -> None:
    for pack in plan().packs:
        Ledger(root).append(pack, results_of(pack), {})


def test_two_writers_at_once_leave_whole_shards(ledger: Ledger):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_all, args=(ledger.root,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert ledger.table(plan()).num_rows == plan().trials


def test_tracked_marks_and_files(ledger: Ledger):
    assert ledger.tracked() == set()
    assert not ledger.has_file("spec.json")
    with pytest.raises(LedgerError, match=r"spec\.json"):
        ledger.read_file("spec.json")
    ledger.write_file("analysis/verdict.json", b"{}")
    ledger.mark_tracked("abc", ["r1"])
    assert ledger.read_file("analysis/verdict.json") == b"{}"
    assert ledger.tracked() == {"abc"}


def test_uri_and_path_name_the_same_ledger(ledger: Ledger, tmp_path: Path):
    ledger.write_file("spec.json", b"1")
    assert Ledger((tmp_path / "study").as_uri()).read_file("spec.json") == b"1"


def test_empty_ledger_has_an_empty_table(ledger: Ledger):
    assert ledger.table(plan()).equals(RESULTS_SCHEMA.empty_table())
    assert isinstance(ledger.table(plan()), pa.Table)


def test_shard_of_the_first_release_reads_as_one_of_today(ledger: Ledger, tmp_path: Path):
    """It lacks every column that came later; its trials had what are now the defaults, and no probes."""
    pack, other = plan().packs[0], Ledger(str(tmp_path / "other"))
    other.append(pack, results_of(pack), {})
    today = other.shard(pack.key)
    first = RESULTS_SCHEMA.names[: RESULTS_SCHEMA.get_field_index("budget_updates")]
    assert len(first) == 36
    old = today.select(first)
    epochs = first.index("epochs")
    old = old.cast(old.schema.set(epochs, pa.field("epochs", pa.int64(), nullable=False)))
    (tmp_path / "study" / "shards").mkdir(parents=True)
    pq.write_table(old, tmp_path / "study" / "shards" / f"{pack.key}.parquet")
    assert ledger.finished() == {pack.key}
    assert ledger.shard(pack.key).equals(today, check_metadata=True)
    row = ledger.shard(pack.key).to_pylist()[0]
    assert (row["placement"], row["gain"], row["weight_decay"], row["schedule"]) == ("pre", False, 0.0, "constant")
    assert (row["momentum"], row["lanes_at_once"], row["probe_updates"]) == (None, None, [])
    for spoilt in (old.drop_columns("reason"), old.append_column("more", pa.array([1] * old.num_rows))):
        pq.write_table(spoilt, tmp_path / "study" / "shards" / f"{pack.key}.parquet")
        with pytest.raises(LedgerError, match="cannot be read"):
            ledger.shard(pack.key)


def test_probes_are_kept_as_they_were_measured(ledger: Ledger):
    pack = plan(probes={"every": 1, "samples": 128}).packs[0]
    probes = tuple(
        Probe(updates, {name: (index + updates / 8, None) for index, name in enumerate(PROBES)}) for updates in (0, 10)
    )
    results = [replace(result, probes=probes, lanes_at_once=2) for result in results_of(pack)]
    ledger.append(pack, results, {})
    row = ledger.shard(pack.key).to_pylist()[-1]
    assert (row["lanes_at_once"], row["probe_every"], row["probe_samples"]) == (2, 1, 128)
    assert row["probe_updates"] == [0, 10]
    assert row["probe_divergence_sd"] == [[1.0, None], [2.25, None]]


def test_lost_pack_is_run_again_and_replaced(ledger: Ledger):
    laid = plan()
    first = laid.packs[0]
    gone = [TrialResult.absent(t, TrialState.LOST, Reason.WORKER_LOST) for t in first.trials]
    ledger.append(first, gone, {"attempt": 1})
    ledger.mark_tracked(first.key, ["r1"])
    assert first not in ledger.missing(laid)
    assert first in ledger.to_run(laid)
    ledger.append(first, results_of(first), {"attempt": 2})
    assert first not in ledger.to_run(laid)
    assert ledger.provenance(first.key) == {"attempt": 2}
    assert ledger.tracked() == set()  # MLflow has to hear of it again


def test_table_of_other_columns_counts_as_damage(ledger: Ledger, tmp_path: Path):
    pack = plan().packs[0]
    (tmp_path / "study" / "shards").mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "study" / "shards" / f"{pack.key}.parquet")
    assert ledger.finished() == set()
    ledger.append(pack, results_of(pack), {})
    assert ledger.finished() == {pack.key}
