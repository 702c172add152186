"""The Tune trainable, driven by hand as Tune drives it: shards, reuse, and what counts as a result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.studies import plan, spec
from trials.engine.data import Dataset, Split, load
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
