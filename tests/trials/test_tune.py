"""The Tune trainable, driven by hand as Tune drives it: shards, reuse, and what counts as a result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.studies import plan, spec
from trials import tune
from trials.engine.data import Dataset, Split, load
from trials.engine.fused import FusedTrainer
from trials.engine.train import PackRun
from trials.ledger import Ledger
from trials.records import Pack
from trials.tune import PackTrainable, _named_trainable


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return load(spec().data, [], tmp_path_factory.mktemp("cache"))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(str(tmp_path / "study"))


def trainable(packs: tuple[Pack, ...], dataset: Dataset, ledger: Ledger, first: int = 0) -> PackTrainable:
    shared: dict[str, Any] = {"packs": packs, "dataset": dataset, "ledger_root": ledger.root, "study_name": "a study"}
    shared |= {"attempt": 2, "threads": 1, "device": "cpu"}

    class Local(PackTrainable):
        def setup(self, config: dict[str, Any], **_: Any) -> None:
            super().setup(config, **shared)

    return Local({"pack": first})


def run(actor: PackTrainable) -> None:
    while not actor.train()["done"]:
        pass


def test_finished_pack_is_in_the_ledger_with_its_provenance(digits: Dataset, ledger: Ledger):
    packs = plan().packs
    run(trainable(packs, digits, ledger))
    assert ledger.finished() == {packs[0].key}
    assert set(ledger.shard(packs[0].key)["state"].to_pylist()) == {"succeeded"}
    provenance = ledger.provenance(packs[0].key)
    assert (provenance["attempt"], provenance["threads"], provenance["lanes"]) == (2, 1, len(packs[0].trials))
    assert provenance["error"] is None
    assert provenance["seconds"] > 0


def test_reused_actor_gives_what_a_fresh_one_gives(digits: Dataset, ledger: Ledger, tmp_path: Path):
    packs, other = plan().packs, Ledger(str(tmp_path / "other"))
    reused = trainable(packs, digits, ledger)
    run(reused)
    assert reused.reset({"pack": 1})
    run(reused)
    run(trainable(packs, digits, other, first=1))
    assert ledger.shard(packs[1].key).equals(other.shard(packs[1].key))


def test_exception_in_training_is_a_result(digits: Dataset, ledger: Ledger):
    """A batch larger than the training split gets past no submission; here it stands for any fault of the engine."""
    short = Split(digits.train.inputs[:50], digits.train.labels[:50])
    few = replace(digits, train=short)
    pack = plan().packs[0]
    run(trainable((pack,), few, ledger))
    rows = ledger.shard(pack.key).to_pylist()
    assert {(row["state"], row["reason"]) for row in rows} == {("failed", "pack_error")}
    assert "batch size 64 is larger than the 50 training samples" in ledger.provenance(pack.key)["error"]


LONGER: dict[str, Any] = {"training.budget": {"epochs": 6}}


def test_a_killed_pack_goes_on_from_its_checkpoint(digits: Dataset, ledger: Ledger, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tune, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(tune, "STEP_SECONDS", 0.0)
    packs, other = plan(**LONGER).packs, Ledger(str(tmp_path / "other"))
    killed = trainable(packs, digits, ledger)
    for _ in range(3):
        killed.train()
        assert killed._advance() is None
    assert ledger.checkpoint(packs[0].key) is not None
    resumed = trainable(packs, digits, ledger)
    assert resumed.train()["epoch"] == 0  # the budget of a step is none here: it has only said that it is there
    resumed._advance()
    assert resumed._run is not None
    assert resumed._run.epoch == 4
    monkeypatch.setattr(tune, "STEP_SECONDS", 1.0)
    run(resumed)
    run(trainable(packs, digits, other))
    assert ledger.shard(packs[0].key).equals(other.shard(packs[0].key))
    assert ledger.checkpoint(packs[0].key) is None  # nothing is left of a pack that has ended


def test_a_damaged_checkpoint_costs_time_and_nothing_else(digits: Dataset, ledger: Ledger, tmp_path: Path):
    packs, other = plan().packs, Ledger(str(tmp_path / "other"))
    ledger.keep_checkpoint(packs[0].key, b"half a checkpoint")
    run(trainable(packs, digits, ledger))
    run(trainable(packs, digits, other))
    assert ledger.shard(packs[0].key).equals(other.shard(packs[0].key))


def test_lanes_at_once_are_settled_by_the_first_attempt(digits: Dataset, ledger: Ledger):
    packs = plan().packs
    ledger.keep_lanes_at_once(packs[0].key, 2)
    run(trainable(packs, digits, ledger))
    run(trainable(packs, digits, ledger, first=1))
    assert set(ledger.shard(packs[0].key)["lanes_at_once"].to_pylist()) == {2}
    assert set(ledger.shard(packs[1].key)["lanes_at_once"].to_pylist()) == {4}  # small: measured to be all of them
    assert ledger.lanes_at_once(packs[1].key) == 4


def test_out_of_memory_halves_the_lanes_and_goes_on(digits: Dataset, ledger: Ledger, tmp_path: Path, monkeypatch):
    """Memory that runs out is a fault that cannot be caused here without taking others down."""
    packs, other = plan(**LONGER).packs, Ledger(str(tmp_path / "other"))
    step, failed_at = PackRun.step, []

    def scarce(self: PackRun) -> None:
        if self.lanes_at_once > 2 and self.epoch == 2:
            failed_at.append(self.lanes_at_once)
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self)

    monkeypatch.setattr(PackRun, "step", scarce)
    run(trainable(packs, digits, ledger))
    assert failed_at == [4]
    assert set(ledger.shard(packs[0].key)["lanes_at_once"].to_pylist()) == {2}
    monkeypatch.setattr(PackRun, "step", step)
    run(trainable(packs, digits, other))
    for column in ("test_loss_by_epoch", "train_loss_by_epoch"):
        for got, expected in zip(
            ledger.shard(packs[0].key)[column].to_pylist(), other.shard(packs[0].key)[column].to_pylist(), strict=True
        ):
            assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"lanes_at_once": "x"}', '{"lanes_at_once": true}'])
def test_a_damaged_number_of_lanes_is_measured_again(digits: Dataset, ledger: Ledger, content: str):
    pack = plan().packs[0]
    ledger.write_file(f"lanes/{pack.key}.json", content.encode())
    run(trainable((pack,), digits, ledger))
    assert set(ledger.shard(pack.key)["state"].to_pylist()) == {"succeeded"}
    assert ledger.lanes_at_once(pack.key) == 4


def test_memory_that_runs_out_while_a_checkpoint_is_read_costs_no_checkpoint(
    digits: Dataset, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tune, "CHECKPOINT_SECONDS", 0.0)
    pack = plan(**LONGER).packs[0]
    first = trainable((pack,), digits, ledger)
    for _ in range(4):
        first._advance()
    load, failures = FusedTrainer.load, []

    def scarce(self: FusedTrainer, state: Any) -> None:
        if not failures:
            failures.append(self.lanes)
            raise torch.OutOfMemoryError("CUDA out of memory")
        load(self, state)

    monkeypatch.setattr(FusedTrainer, "load", scarce)
    second = trainable((pack,), digits, ledger)
    second._advance()
    assert failures == [4]
    second._advance()
    assert second._run is not None
    assert (second._run.epoch, second._run.lanes_at_once) == (5, 2)


def test_memory_that_never_suffices_is_a_result(digits: Dataset, ledger: Ledger, monkeypatch):
    def never(self: PackRun) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(PackRun, "step", never)
    pack = plan().packs[0]
    run(trainable((pack,), digits, ledger))
    rows = ledger.shard(pack.key).to_pylist()
    assert {(row["state"], row["reason"]) for row in rows} == {("failed", "pack_error")}
    assert ledger.lanes_at_once(pack.key) == 2


def test_storage_fault_is_not_a_result(digits: Dataset, ledger: Ledger):
    """A full or broken disk says nothing about the pack: Tune retries it, then the next attempt."""
    Path(ledger.root).mkdir()
    (Path(ledger.root) / "shards").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="shards"):
        run(trainable(plan().packs, digits, ledger))
    assert ledger.tracked() == set()


def test_actor_class_carries_the_studys_name_and_needs():
    named = _named_trainable("my study-1.2", {"CPU": 2, "GPU": 0})
    assert named.__name__ == "Pack_my_study_1_2"
    request = named.default_resource_request({})
    assert request is not None
    assert request.bundles == [{"CPU": 2}]
