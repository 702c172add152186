"""The choice of lanes at once: what it may be, and when it is worth measuring."""

import weakref

import pytest
import torch

from tests.trials.engine.plain import make_dataset, make_pack
from trials.engine import PackRun, measure
from trials.engine.errors import is_out_of_memory

PACK = make_pack(seeds=[0, 1, 2, 3], rates=[0.1, 0.2])


def test_small_and_short_packs_train_all_at_once_and_are_not_measured(monkeypatch):
    speeds = []
    monkeypatch.setattr(measure, "_speed", lambda run, dataset: speeds.append(run) or 1e9)
    assert measure.choose_lanes_at_once(PACK, make_dataset()) == 8
    assert speeds == []  # in cache whole
    monkeypatch.setattr(measure, "CACHE_BYTES", 0)
    assert measure.choose_lanes_at_once(PACK, make_dataset()) == 8
    assert len(speeds) == 1  # soon done
    assert measure.choose_lanes_at_once(make_pack(seeds=[0], rates=[0.1]), make_dataset()) == 1


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((10, 20, 30), 2), ((10, 20, 21), 4), ((10, 10.5, 10.9), 8), ((30, 20, 10), 8)],
)
def test_fewer_lanes_have_to_be_clearly_faster(monkeypatch, speeds, expected):
    monkeypatch.setattr(measure, "CACHE_BYTES", 0)
    measured = dict(zip((8, 4, 2), speeds, strict=True))
    monkeypatch.setattr(measure, "_speed", lambda run, dataset: measured[run.lanes_at_once])
    assert measure.choose_lanes_at_once(PACK, make_dataset()) == expected


def test_it_measures_for_real_and_memory_that_runs_out_is_a_measurement(monkeypatch):
    monkeypatch.setattr(measure, "CACHE_BYTES", 0)
    monkeypatch.setattr(measure, "WORTH_SECONDS", 0.0)
    assert measure.choose_lanes_at_once(PACK, make_dataset()) in (8, 4, 2)
    speed = measure._speed

    def scarce(run: PackRun, dataset):
        if run.lanes_at_once > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return speed(run, dataset)

    monkeypatch.setattr(measure, "_speed", scarce)
    assert measure.choose_lanes_at_once(PACK, make_dataset()) == 2


def test_it_goes_down_to_what_fits_and_holds_one_candidate_at_a_time(monkeypatch):
    pack = make_pack(seeds=list(range(16)), rates=[0.1, 0.2], batch_size=32)
    alive: list[weakref.ref[PackRun]] = []

    def scarce(run: PackRun, dataset):
        assert [ref for ref in alive if ref() is not None] == []
        alive.append(weakref.ref(run))
        if run.lanes_at_once > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1.0

    monkeypatch.setattr(measure, "CACHE_BYTES", 0)
    monkeypatch.setattr(measure, "_speed", scarce)
    assert measure.choose_lanes_at_once(pack, make_dataset()) == 2
    assert len(alive) == 5  # 32, 16, 8, 4, 2
    assert [measure.fewer(n) for n in (7, 6, 3, 2)] == [3, 3, 2, 2]


def test_what_is_out_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape '[3]' is invalid"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
