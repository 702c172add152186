"""The three parts of the embedded stack: how each is started, and how one sees that it works."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

import httpx
import psutil

from service.places import DataFolder
from service.ports import HOST
from service.processes import RAY_SESSIONS, VARIABLE

MAX_OBJECT_STORE = 2 * 1024**3
MIN_OBJECT_STORE = 100 * 1024**2

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""For the servers, whose cores the training needs. Ray sets the workers' own from their CPU request."""

NOT_HANDED_ON = ("RAY_", "MLFLOW_", "UVICORN_", "GUNICORN_")
"""Prefixes of a user's variables that must not reach the parts: a `RAY_ADDRESS` would draw the
studies to somebody's cluster, an `MLFLOW_TRACKING_URI` their results to another server."""


@dataclass
class Part:
    """One part and, once started, its process.

    `health` is None where the part works, else what is amiss, for a message.
    """

    key: str
    title: str
    port: int
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    health: Callable[[httpx.Client], str | None]
    process: Popen[bytes] | None = None
    deaths: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def ray_head(
    folder: DataFolder, tag: str, port: int, *, client_port: int, ray_folder: Path, cpus: int | None = None
) -> Part:
    """A Ray head with its dashboard and Jobs API, every port of it on loopback.

    Args:
        ray_folder: short path (sockets below it must stay within 107 bytes) of an existing folder
            of this user only: Ray opens what it makes in it to everybody.
        client_port: a free port for Ray's client server, which cannot be switched off.
        cpus: cores that studies may use; by default those this process may run on.
    """
    url = f"http://{HOST}:{port}"
    options = {
        "port": 0,
        "node-ip-address": HOST,
        "dashboard-host": HOST,
        "dashboard-port": port,
        "include-dashboard": "true",
        "ray-client-server-port": client_port,
        "dashboard-agent-listen-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "temp-dir": ray_folder / RAY_SESSIONS,
        "num-cpus": cpus or usable_cores(),
        "object-store-memory": object_store_bytes(psutil.virtual_memory().total),
        "log-style": "record",
        "log-color": "false",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    own = {
        # Otherwise GCS, raylet and metrics listen on all interfaces, whatever the node's address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "disabled",
        # The ledger has what is finished; waiting for the rest would hold up Ctrl-C by 30 s.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray's workers rename themselves over their environment, and with it over our tag.
        "SPT_NOENV": "1",
    }

    def health(client: httpx.Client) -> str | None:
        nodes = client.get(f"{url}/nodes", params={"view": "summary"})
        if not nodes.is_success:
            return f"the dashboard answers {nodes.status_code}"
        summary = nodes.json().get("data", {}).get("summary", [])
        if not any(node.get("raylet", {}).get("state") == "ALIVE" for node in summary):
            return "its node is not alive yet"
        jobs = client.get(f"{url}/api/jobs/")
        return None if jobs.is_success else f"the Jobs API answers {jobs.status_code}"

    environment = _environment(f"{tag}ray", own)
    return Part("ray", "Ray", port, command, environment, ray_folder, folder.logs / "ray.log", health)


def mlflow_server(folder: DataFolder, tag: str, port: int) -> Part:
    """An MLflow server on SQLite that serves the artifacts itself, from a local folder."""
    options = {
        "host": HOST,
        "port": port,
        "workers": 1,
        "backend-store-uri": f"sqlite:///{folder.mlflow_database}",
        "artifacts-destination": folder.mlflow_artifacts.as_uri(),
        "uvicorn-opts": "--log-level warning",
    }
    command = [sys.executable, "-m", "mlflow", "server", *(f"--{name}={value}" for name, value in options.items())]
    # Without job execution the server starts in a third of the time and a sixth of the memory.
    own = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **ONE_THREAD}

    def health(client: httpx.Client) -> str | None:
        answer = client.get(f"http://{HOST}:{port}/health")
        return None if answer.is_success else f"it answers {answer.status_code}"

    environment = _environment(f"{tag}mlflow", own)
    return Part("mlflow", "MLflow", port, command, environment, folder.root, folder.logs / "mlflow.log", health)


def rest_service(
    folder: DataFolder, tag: str, port: int, *, ray_url: str, mlflow_url: str, data_roots: Sequence[Path]
) -> Part:
    """The REST service, told where everything is."""
    own = {
        "NORMSTUDY_HOST": HOST,
        "NORMSTUDY_PORT": str(port),
        "NORMSTUDY_DATA_DIR": str(folder.root),
        "NORMSTUDY_DATABASE_URL": f"sqlite:///{folder.database}",
        "NORMSTUDY_STORAGE": str(folder.studies),
        "NORMSTUDY_RAY_DASHBOARD_URL": ray_url,
        "NORMSTUDY_MLFLOW_URL": mlflow_url,
        "NORMSTUDY_DATA_ROOTS": json.dumps([str(root) for root in data_roots]),
        "NORMSTUDY_CACHE_DIR": str(folder.cache),
        "NORMSTUDY_DRIVER_PYTHON": sys.executable,
        **ONE_THREAD,
    }
    command = [sys.executable, "-m", "service.serve"]

    def health(client: httpx.Client) -> str | None:
        answer = client.get(f"http://{HOST}:{port}/readyz")
        return None if answer.is_success else f"it is not ready: {answer.text[:300]}"

    environment = _environment(f"{tag}api", own)
    return Part("api", "Normstudy", port, command, environment, folder.root, folder.logs / "service.log", health)


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def object_store_bytes(memory: int) -> int:
    """Ray's shared memory: a tenth of the machine's, within 100 MiB and 2 GiB.

    A data set goes through it once per pack; nothing else of size does.
    """
    return max(MIN_OBJECT_STORE, min(MAX_OBJECT_STORE, memory // 10))


def _environment(tag: str, own: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_HANDED_ON)}
    environment |= {"PYTHONUNBUFFERED": "1", VARIABLE: tag, **own}
    for name in ("NO_PROXY", "no_proxy"):  # the parts talk to each other, through nobody's proxy
        others = environment.get(name)
        environment[name] = f"{HOST},localhost" + (f",{others}" if others else "")
    return environment
