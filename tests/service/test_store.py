"""The store's duties, on each database it runs on."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.migrate import open_store
from service.store import KeyReused, Store, StoreUnavailable, Study, StudyState, StudyUnknown
from tests.service.helpers import study_from
from tests.studies import spec

MOMENT = datetime(2026, 12, 1, 8, 30, 15, 123456, tzinfo=UTC)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    store = open_store(database_url)
    yield store
    store.close()


def new(**changes: Any) -> Study:
    study = study_from(spec())
    for name, value in changes.items():
        setattr(study, name, value)
    return study


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(0) … work(count - 1)`, begun at the same moment in as many threads."""
    barrier = threading.Barrier(count)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_what_was_created_is_read_back_by_another_store(store: Store, database_url: str):
    study = new(created_at=MOMENT.astimezone(), cost={"samples": 3, "updates": 2, "core_seconds": 1.5})
    store.create(study)
    other = open_store(database_url)
    seen = other.get(study.id)
    other.close()
    assert seen.created_at == MOMENT
    assert seen.created_at.tzinfo == UTC
    assert seen.spec == study.spec
    assert seen.facts == study.facts
    assert seen.cost == {"samples": 3, "updates": 2, "core_seconds": 1.5}
    assert (seen.progress, seen.verdict, seen.published) == (None, None, False)


def test_unknown_study(store: Store):
    with pytest.raises(StudyUnknown, match="snone"):
        store.get("snone")


def test_a_key_makes_one_study(store: Store):
    first, created = store.create(new(), "key", "hash")
    again, created_again = store.create(new(), "key", "hash")
    assert (created, created_again) == (True, False)
    assert again.id == first.id
    assert len(store.page(10)) == 1
    assert store.by_key("key", "hash").id == first.id  # pyright: ignore[reportOptionalMemberAccess]
    assert store.by_key("other", "hash") is None


def test_a_key_of_another_request_is_refused(store: Store):
    store.create(new(), "key", "hash")
    with pytest.raises(KeyReused, match="key"):
        store.create(new(), "key", "other")
    with pytest.raises(KeyReused, match="key"):
        store.by_key("key", "other")
    assert len(store.page(10)) == 1


def test_simultaneous_requests_of_one_key_make_one_study(store: Store):
    made = together(16, lambda _: store.create(new(), "key", "hash"))
    assert sum(created for _, created in made) == 1
    assert len({study.id for study, _ in made}) == 1
    assert len(store.page(100)) == 1


def test_sixteen_writers_and_a_reader_lose_nothing(store: Store):
    def write(writer: int) -> list[str]:
        ids = []
        for index in range(10):
            study = new(name=f"w{writer}-{index}")
            store.create(study)
            assert store.transition(study.id, StudyState.QUEUED, StudyState.RUNNING)
            store.page(50)
            ids.append(study.id)
        return ids

    ids = {study_id for made in together(16, write) for study_id in made}
    assert {study.id for study in store.page(500, state=StudyState.RUNNING)} == ids
    assert len(ids) == 160


def test_a_transition_is_won_by_one(store: Store):
    study, _ = store.create(new())
    won = together(12, lambda _: store.transition(study.id, StudyState.QUEUED, StudyState.CANCELLING))
    assert sum(won) == 1
    assert store.get(study.id).state == StudyState.CANCELLING


def test_a_transition_asks_for_state_and_attempt(store: Store):
    study, _ = store.create(new())
    assert not store.transition(study.id, StudyState.RUNNING, StudyState.ANALYSING)
    assert not store.transition(study.id, StudyState.QUEUED, StudyState.RUNNING, attempt=2)
    assert not store.transition("snone", StudyState.QUEUED, StudyState.RUNNING)
    assert store.get(study.id).state == StudyState.QUEUED
    changes = {"reason": "because", "started_at": MOMENT, "verdict": [{"hypothesis": 0, "verdict": "supported"}]}
    before = (StudyState.FAILED, StudyState.QUEUED)
    assert store.transition(study.id, before, StudyState.RUNNING, attempt=1, changes=changes)
    seen = store.get(study.id)
    assert (seen.state, seen.reason, seen.started_at) == ("RUNNING", "because", MOMENT)
    assert seen.verdict == [{"hypothesis": 0, "verdict": "supported"}]


def test_null_is_null_again(store: Store):
    study, _ = store.create(new(verdict=[], progress={"trials_done": 1}))
    assert store.note(study, verdict=None, progress=None)
    with store.engine.connect() as connection:
        nulls = sa.select(Study.id).where(Study.verdict.is_(None), Study.progress.is_(None))
        assert connection.execute(nulls).scalar_one() == study.id


def test_a_note_does_not_reach_a_study_that_has_moved_on(store: Store):
    study, _ = store.create(new())
    store.transition(study.id, StudyState.QUEUED, StudyState.CANCELLING)
    assert not store.note(study, reason="waiting")
    assert store.get(study.id).reason is None
    back = {"attempt": 2}
    store.transition(study.id, StudyState.CANCELLING, StudyState.QUEUED, changes=back)
    assert not store.note(study, reason="waiting"), "the state is the same again, the attempt is not"
    assert store.get(study.id).reason is None


def test_pages_are_newest_first_and_complete(store: Store):
    moments = [MOMENT + timedelta(microseconds=index // 3) for index in range(20)]  # thirds share a moment
    made = [store.create(new(created_at=moment))[0] for moment in moments]
    expected = sorted(made, key=lambda s: (s.created_at, s.id), reverse=True)
    seen: list[Study] = []
    after = None
    while page := store.page(3, after=after):
        seen += page
        after = (page[-1].created_at, page[-1].id)
    assert [s.id for s in seen] == [s.id for s in expected]


def test_pages_by_state_and_text(store: Store):
    for name in ("Alpha_one", "alpha two", "beta 100", "alphaXone"):
        store.create(new(name=name))
    named = {s.name for s in store.page(10, text="ALPHA")}
    assert named == {"Alpha_one", "alpha two", "alphaXone"}
    assert {s.name for s in store.page(10, text="a_o")} == {"Alpha_one"}, "an underscore is a letter here"
    assert store.page(10, text="%") == []
    beta = store.page(10, text="beta")[0]
    assert [s.id for s in store.page(10, text=beta.id[:7].upper())] == [beta.id]
    store.transition(beta.id, StudyState.QUEUED, StudyState.RUNNING)
    assert [s.id for s in store.page(10, state=StudyState.RUNNING)] == [beta.id]


def test_active_and_unpublished_are_oldest_first(store: Store):
    made = [store.create(new(created_at=MOMENT + timedelta(seconds=i)))[0] for i in range(len(StudyState))]
    for study, state in zip(made, StudyState, strict=True):
        store.transition(study.id, StudyState.QUEUED, state)
    assert [s.state for s in store.active()] == ["QUEUED", "RUNNING", "CANCELLING", "ANALYSING"]
    assert [s.state for s in store.unpublished()] == ["COMPLETED", "FAILED", "CANCELLED"]
    store.note(store.get(made[4].id), published=True)
    assert [s.state for s in store.unpublished()] == ["FAILED", "CANCELLED"]


def test_a_database_that_fails_is_said_to_be_away(store: Store):
    with store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE idempotency_keys")
        connection.exec_driver_sql("DROP TABLE studies")
    for call in (lambda: store.get("s1"), store.active, lambda: store.create(new()), lambda: store.page(1)):
        with pytest.raises(StoreUnavailable, match="studies"):
            call()


def test_a_key_cannot_outlive_its_study(store: Store):
    study, _ = store.create(new(), "key", "hash")
    with store.engine.begin() as connection:
        connection.execute(sa.delete(Study).where(Study.id == study.id))
    assert store.by_key("key", "hash") is None


def test_the_check_writes_and_leaves_nothing(store: Store):
    store.check()
    assert store.page(10) == []


def test_the_check_sees_a_database_that_only_reads(tmp_path: Path):
    open_store(f"sqlite:///{tmp_path}/normstudy.db").close()
    store = Store(f"sqlite:///file:{tmp_path}/normstudy.db?mode=ro&uri=true")
    assert store.page(10) == []
    with pytest.raises(StoreUnavailable, match="readonly"):
        store.check()


def test_a_nul_is_in_no_id(store: Store):
    with pytest.raises(StudyUnknown):
        store.get("s\0")


def test_nothing_listens():
    store = Store("postgresql+psycopg://nobody@127.0.0.1:9/none")
    with pytest.raises(StoreUnavailable):
        store.check()
