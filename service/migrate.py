"""Brings the database to this release's schema, whichever of several starting services comes first."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError

from service.store import Store, StoreUnavailable, translated

_POSTGRESQL_LOCK = 0x6E6F726D  # "norm": any constant that all services share
_THREADS = threading.Lock()  # Alembic's context is global to the process


def open_store(url: str) -> Store:
    """A store whose tables are this release's.

    Raises:
        StoreUnavailable: the database does not answer, or was made by a later release.
    """
    with _THREADS, _file_lock(url), translated():
        store = Store(url)
        try:
            _upgrade(store.engine)
        except CommandError as error:
            store.close()
            raise StoreUnavailable(
                f"the database was made by a later release of Normstudy than this one ({error}); "
                "upgrade Normstudy, or give it another database"
            ) from error
        except BaseException:
            store.close()
            raise
    return store


def config(connection: sa.Connection | None = None) -> Config:
    """Alembic's configuration, for the command line of developers too."""
    result = Config()
    folder = Path(__file__).parent / "migrations"
    result.set_main_option("script_location", str(folder).replace("%", "%%"))
    result.attributes["connection"] = connection
    return result


def _upgrade(engine: sa.Engine) -> None:
    with engine.execution_options(begin_immediate=True).begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRESQL_LOCK})
        command.upgrade(config(connection), "head")


@contextmanager
def _file_lock(url: str) -> Iterator[None]:
    """Keeps other processes out while SQLite's file is made: turning WAL on does not wait for its turn."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        yield
        return
    path = os.path.abspath(parsed.database)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(path + ".lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be made: {error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or by the kernel
        yield
