"""One real stack (Ray, MLflow, the service) for all end-to-end tests, on free ports and a fresh folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import Client
from service.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("stack"))
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def urls(stack: Stack) -> dict[str, str]:
    assert stack.state is not None
    return {"api": stack.state.api, "ray": stack.state.ray_dashboard, "mlflow": stack.state.mlflow}


@pytest.fixture(scope="session")
def client(urls: dict[str, str]) -> Iterator[Client]:
    with Client(urls["api"]) as api:
        yield api


@pytest.fixture(scope="session")
def studies_folder(stack: Stack) -> Path:
    return stack.folder.studies
