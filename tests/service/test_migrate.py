"""The schema, brought about by whoever starts first."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.migrate import open_store
from service.store import Base, StoreUnavailable

_START = """
import sys
from service.migrate import open_store
store = open_store(sys.argv[1])
print(len(store.page(10)))
"""


def test_migrations_make_what_the_models_say(database_url: str):
    store = open_store(database_url)
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    store.close()


def test_simultaneous_first_starts(database_url: str):
    """Processes, and threads within one."""
    processes = [
        subprocess.Popen([sys.executable, "-c", _START, database_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: open_store(database_url), range(6)))
    for store in stores:
        assert store.page(10) == []
        store.close()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        assert out == b"0\n"


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
