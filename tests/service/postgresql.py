"""A real PostgreSQL server of one's own for tests: loopback, own data folder, gone afterwards."""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tests.ports import free_port

_DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def binaries() -> Path | None:
    """Folder of the server's programs, if they are installed."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    return _DEBIAN[-1] if _DEBIAN else None


class PostgresServer:
    def __init__(self, url: str):
        self._url = url

    def new_database(self) -> str:
        """URL of a fresh, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        engine = sa.create_engine(self._url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return self._url.rsplit("/", 1)[0] + f"/{name}"


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    programs = binaries()
    assert programs is not None
    # The server refuses to run as root, and its user must be able to reach the folder.
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="normstudy-pg-"))
    process = None
    try:
        if user:
            shutil.chown(folder, user)
        data, port = folder / "data", free_port()
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync"],
            check=True,
            capture_output=True,
            user=user,
            cwd=folder,
        )
        command = [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-F"]
        with open(folder / "server.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd=folder)
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        _wait(url, folder / "server.log")
        yield PostgresServer(url)
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, log: Path) -> None:
    engine = sa.create_engine(url)
    deadline = time.monotonic() + 60
    while True:
        try:
            with engine.connect():
                engine.dispose()
                return
        except OperationalError:
            if time.monotonic() > deadline:
                raise RuntimeError(log.read_text()) from None
            time.sleep(0.1)
