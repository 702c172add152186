"""Fixtures of the service's tests: databases, a fake Ray, and the service itself behind real sockets."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from service.analysing import Analyser
from service.app import create_app
from service.settings import Settings
from tests.service.fake_ray import FakeRay, fake_ray
from tests.service.helpers import assert_problem, quick_verdict, settings_for
from tests.service.postgresql import PostgresServer, binaries, postgres_server

Serve = Callable[[Settings], httpx.Client]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    if binaries() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("PostgreSQL's programs (initdb, postgres) are not installed")
        pytest.skip("PostgreSQL is not installed here")
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/normstudy.db"
    return request.getfixturevalue("postgres").new_database()


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray() as fake:
        yield fake


@contextmanager
def served(settings: Settings) -> Iterator[httpx.Client]:
    """The service in a thread of this process, and a client that checks the shape of every error."""
    app = create_app(settings, Analyser(60, quick_verdict))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, event_hooks={"response": [assert_problem]}
    ) as client:
        yield client
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda settings: stack.enter_context(served(settings))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service whose Ray is away: what is submitted stays QUEUED."""
    with served(settings_for(tmp_path_factory.mktemp("service"), max_trials=2000)) as client:
        yield client
