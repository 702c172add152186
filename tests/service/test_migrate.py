"""The schema, brought about by whoever starts first."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.migrate import config, open_store
from service.store import Base, StoreUnavailable, make_engine

_START = """
import sys
from service.migrate import open_store
print("imported", flush=True)
for url in sys.stdin.readline().split():
    store = open_store(url)
    print(len(store.page(10)), flush=True)
    store.close()
"""


def test_migrations_make_what_the_models_say(database_url: str):
    store = open_store(database_url)
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_simultaneous_first_starts(kind: str, tmp_path: Path, request: pytest.FixtureRequest):
    """Processes that begin at the same moment, on several fresh databases in turn."""
    if kind == "sqlite":
        urls = [f"sqlite:///{tmp_path}/{number}/normstudy.db" for number in range(8)]
    else:
        urls = [request.getfixturevalue("postgres").new_database() for _ in range(4)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(" ".join(urls) + "\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == "0\n" * len(urls)


def test_simultaneous_first_starts_of_threads(database_url: str):
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: open_store(database_url), range(6)))
    for store in stores:
        assert store.page(10) == []
        store.close()


def test_studies_of_the_first_release_are_kept(database_url: str):
    engine = make_engine(database_url)
    with engine.begin() as connection:
        command.upgrade(config(connection), "0001")
        columns = "id, name, state, created_at, attempt, first_attempt, spec, spec_hash, facts"
        connection.execute(
            sa.text(
                f"INSERT INTO studies ({columns}, trials, cells, packs, cost, published) VALUES "
                "('s1', 'old', 'FAILED', '2026-12-01 08:00:00', 2, 1, '{}', 'x', '{}', 1, 1, 1, '{}', true)"
            )
        )
    engine.dispose()
    store = open_store(database_url)
    study = store.get("s1")
    assert (study.name, study.attempt, study.forgotten) == ("old", 2, 0)
    store.close()


def test_a_database_of_a_later_release_is_refused(database_url: str):
    store = open_store(database_url)
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(StoreUnavailable, match="later release"):
        open_store(database_url)


def test_sqlite_runs_as_it_must(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/deep/er/normstudy.db")
    with store.engine.connect() as connection:
        read = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")
        }
        assert read == {"journal_mode": "wal", "foreign_keys": 1}
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30000
    store.close()


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable):
        open_store(f"sqlite:///{tmp_path}/file/normstudy.db")
