"""What MLflow costs per trial of 50 metrics: processor time of this process and of the server, and wall time.

    python -m benchmarks.tracking [--trials 240] [--rounds 3] [--json FILE]

A real server on SQLite, started as `normstudy up` starts one; a ledger with finished packs of 24
trials (10 epochs × 5 metrics, made up); and the product's `Tracker`, which sends them. One pack warms
up, in a study of its own.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from benchmarks.common import about, arguments, grid_pack, median, table, write_json
from service.stack import interruptible
from trials.ledger import Ledger
from trials.plan import Cost, Plan
from trials.records import METRICS, Pack, TrialResult, TrialState
from trials.spec.documents import load_preset
from trials.tracking import Tracker

EPOCHS, SEEDS, RATES = 10, 6, 4
HEAD = ("metrics per trial", "trials", "client CPU, ms", "server CPU, ms", "together, ms", "wall, ms")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=240, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    context = about(trials=options.trials, rounds=options.rounds)
    packs = max(1, options.trials // (SEEDS * RATES))
    with tempfile.TemporaryDirectory(prefix="normstudy-bench-") as folder, _server(Path(folder)) as (url, server):
        send(Path(folder), "warm-up", 1, url, server)
        rounds = [send(Path(folder), f"round-{turn}", packs, url, server) for turn in range(options.rounds)]
    client, at_server, wall = (median([found[place] for found in rounds]) * 1000 for place in range(3))
    trials = packs * SEEDS * RATES
    row = [
        str(EPOCHS * len(METRICS)),
        str(trials),
        *(f"{v:.1f}" for v in (client, at_server, client + at_server, wall)),
    ]
    markdown = table(HEAD, [row])
    print(markdown)
    figures = {"client_ms": client, "server_ms": at_server, "cpu_ms": client + at_server, "wall_ms": wall}
    content = {"about": context, "warm_up": "one pack", "figures": figures, "rounds": rounds, "markdown": markdown}
    write_json(options.json, content)


def send(folder: Path, study: str, packs: int, url: str, server: psutil.Process) -> tuple[float, float, float]:
    """Send packs of finished trials; seconds per trial: of this process, of the server, and on the clock."""
    laid = tuple(_pack(index) for index in range(packs))
    trials = sum(len(pack.trials) for pack in laid)
    ledger = Ledger(str(folder / study))
    for pack in laid:
        provenance = {"started_at": datetime.now(UTC).isoformat(), "seconds": 1.0}
        ledger.append(pack, [_result(pack, place) for place in range(len(pack.trials))], provenance)
    tracker = Tracker(ledger, Plan(laid, trials, trials, Cost(0, 0, 0.0)), load_preset("batch-size-digits"), study, url)
    before = _cpu_seconds(psutil.Process(), alone=True), _cpu_seconds(server), time.perf_counter()
    tracker.start()
    if not tracker.finish():
        raise RuntimeError("MLflow has not taken all trials; its log is above")
    after = _cpu_seconds(psutil.Process(), alone=True), _cpu_seconds(server), time.perf_counter()
    client, at_server, wall = ((end - start) / trials for start, end in zip(before, after, strict=True))
    return client, at_server, wall


def _pack(index: int) -> Pack:
    pack = grid_pack(SEEDS, RATES, EPOCHS, batch_size=4 + index)
    return Pack(f"{index:016x}", f"none-B{4 + index}", pack.trials)


def _result(pack: Pack, place: int) -> TrialResult:
    curves: dict[str, tuple[float | None, ...]] = {
        metric: tuple(1 / (1 + place + epoch) for epoch in range(EPOCHS)) for metric in METRICS
    }
    trial = pack.trials[place]
    return TrialResult(trial, TrialState.SUCCEEDED, None, EPOCHS, 1000, 1000 * trial.batch_size, 0.1, curves)


def _cpu_seconds(process: psutil.Process, *, alone: bool = False) -> float:
    """User and system time of a process, with that of its living descendants."""
    family = [process] if alone else [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """MLflow on SQLite with one worker, as `service.parts` starts it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--uvicorn-opts", "--log-level warning"]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = folder / "mlflow.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=os.environ | quiet, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, log)
        yield url, psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, 9)  # its own session: only what was started here
        process.wait()


def _wait_until_healthy(url: str, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"MLflow did not start: {log.read_text()[-2000:]}")


if __name__ == "__main__":
    with interruptible():  # so that a signal leaves nothing running
        main()
