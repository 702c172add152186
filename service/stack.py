"""The embedded stack: Ray, MLflow and the service as child processes of `normstudy up`.

Whatever happens (a part that does not start, Ctrl-C, a signal, an error of ours, even `kill -9`),
nothing of it is left running and nobody else's process is touched: see `service.processes`.
"""

import contextlib
import fcntl
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import httpx

from service import processes
from service.parts import Part, mlflow_server, ray_head, rest_service
from service.places import DataFolder, StackState, read_state, running_stack, write_state
from service.ports import PortLease, PortTaken, lease

API_PORT, RAY_PORT, MLFLOW_PORT, RAY_CLIENT_PORT = 8080, 8265, 5000, 10001
MAX_DEATHS, DEATHS_WITHIN_SECONDS = 3, 600
"""A part that has died this often within that time is not started again."""

Happening = Literal["starting", "ready", "died", "restarted", "leftovers", "stopping", "stopped"]


class StackError(Exception):
    """The stack cannot run; the text is for the user.

    ├── AlreadyRunning   another `up` has this data folder
    ├── PartFailed       a part did not start, or keeps dying
    └── CannotStart      the data folder or a port cannot be used
    """


class AlreadyRunning(StackError):
    def __init__(self, folder: Path, state: StackState | None):
        self.state = state
        where = f": {state.api} (process {state.pid})" if state else ", and is just starting"
        super().__init__(f"a stack is already running on {folder}{where}")


class PartFailed(StackError):
    """`log` is the file whose last lines are in `tail`."""

    def __init__(self, part: Part, why: str):
        self.part, self.why, self.log, self.tail = part, why, part.log, log_tail(part.log)
        super().__init__(f"{part.title} {why}; its log is {part.log}")


class CannotStart(StackError):
    pass


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within: Ctrl-C, SIGTERM and SIGHUP raise `Interrupted`, so that `finally` blocks run.

    A SIGHUP that is ignored already (`nohup`) stays ignored.
    """

    def interrupt(signum: int, _frame: object) -> None:
        raise Interrupted(signum)

    signals = [s for s in ENDING_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, interrupt) for s in signals}
    try:
        yield
    finally:
        _restore(before)


class Stack:
    """One stack on one data folder. Use from the main thread, once; `stop` is always safe to call.

    Args:
        data_dir: where everything lasting is kept; made if missing.
        api_port, ray_port, mlflow_port: exactly this port; by default the usual one or, if it is
            taken, the next free one.
        data_roots: folders that studies may read data from; by default `<data_dir>/data`.
        cpus: cores given to Ray; by default all.
        tell: called with what happens and to which part, for display.
        start_seconds: longest time for each part to become healthy.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        api_port: int | None = None,
        ray_port: int | None = None,
        mlflow_port: int | None = None,
        data_roots: Sequence[Path] = (),
        cpus: int | None = None,
        tell: Callable[[Happening, Part | None], None] = lambda happening, part: None,
        start_seconds: float = 120.0,
    ):
        self.folder = DataFolder(data_dir.expanduser().absolute())
        self.parts: list[Part] = []
        self.state: StackState | None = None
        self._ports = {"api": (API_PORT, api_port), "ray": (RAY_PORT, ray_port), "mlflow": (MLFLOW_PORT, mlflow_port)}
        self._data_roots = [root.expanduser().absolute() for root in data_roots] or [self.folder.data]
        self._cpus, self.tell, self._start_seconds = cpus, tell, start_seconds
        self._tag = processes.new_tag(self.folder.root)
        self._lock: IO[str] | None = None
        self._leases: list[PortLease] = []
        self._ray_folder: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    def start(self) -> StackState:
        """Start the parts and wait until each works. On any failure nothing stays behind.

        Raises:
            AlreadyRunning, PartFailed, CannotStart
        """
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def tend(self) -> None:
        """Start again whatever part has died. Call every second or so.

        Raises:
            PartFailed: a part has died too often, or does not come up again.
        """
        for part in self.parts:
            if part.process is None or part.process.poll() is None:
                continue
            now = time.monotonic()
            part.deaths = [d for d in part.deaths if now - d < DEATHS_WITHIN_SECONDS] + [now]
            if len(part.deaths) > MAX_DEATHS:
                raise PartFailed(part, f"has died {len(part.deaths)} times ({_ending(part.process)})")
            self.tell("died", part)
            processes.end(f"{self._tag}{part.key}")
            self._spawn(part)
            self._await([part])
            self.tell("restarted", part)

    def supervise(self) -> None:
        """Tend the parts until a signal ends it (as `Interrupted`, within `interruptible`).

        Raises:
            PartFailed
        """
        while True:
            self.tend()
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop everything that was started, the service first so that it sees no part vanish."""
        with _undisturbed():
            if self._lock is None:
                return
            if any(part.process is not None for part in self.parts):
                self.tell("stopping", None)
            watchdog = {self._watchdog.pid} if self._watchdog else set()
            processes.end(f"{self._tag}api", grace=10, spare=watchdog)
            processes.end(self._tag, grace=5, spare=watchdog)
            for part in self.parts:
                if part.process is not None:
                    part.process.wait(timeout=10)
            if self._ray_folder is not None:
                processes.retire_ray_folder(self._ray_folder, self.folder.logs)
            if self._watchdog is not None:
                self._watchdog.communicate(timeout=30)  # closes its input; it finds nothing left and ends
            for held in self._leases:
                held.release()
            self.folder.state.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            self.tell("stopped", None)

    def _start(self) -> StackState:
        self._take_folder()
        last = read_state(self.folder)
        if processes.end(processes.folder_tag(self.folder.root)):
            self.tell("leftovers", None)
        if last is not None:
            processes.retire_ray_folder(last.ray_folder, self.folder.logs)
        ports = self._lease_ports()
        # Not under TMPDIR, which can be too long for the sockets in it.
        self._ray_folder = Path(tempfile.mkdtemp(prefix=processes.RAY_FOLDER_PREFIX, dir="/tmp"))
        ray = ray_head(
            self.folder,
            self._tag,
            ports["ray"].port,
            client_port=ports["client"].port,
            ray_folder=self._ray_folder,
            cpus=self._cpus,
        )
        mlflow = mlflow_server(self.folder, self._tag, ports["mlflow"].port)
        api = rest_service(
            self.folder,
            self._tag,
            ports["api"].port,
            ray_url=ray.url,
            mlflow_url=mlflow.url,
            data_roots=self._data_roots,
        )
        state = StackState.of_this_process(
            self._tag, api=api.url, ray_dashboard=ray.url, mlflow=mlflow.url, ray_folder=self._ray_folder
        )
        write_state(self.folder, state)
        self.parts = [ray, mlflow, api]
        self._watchdog = self._start_watchdog(self._ray_folder)
        for together in ([ray, mlflow], [api]):
            for part in together:
                self._spawn(part)
                self.tell("starting", part)
            self._await(together)
        self.state = state.now_ready()
        write_state(self.folder, self.state)
        return self.state

    def _take_folder(self) -> None:
        unusable = set("?#%\n") & set(str(self.folder.root))
        if unusable:
            raise CannotStart(f"the data folder's path has {' '.join(sorted(unusable))!r}, which database URLs cannot")
        try:
            self.folder.create()
            lock = self.folder.lock.open("a")
        except OSError as error:
            raise CannotStart(f"the data folder cannot be used: {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise AlreadyRunning(self.folder.root, running_stack(self.folder.root)) from None
        self._lock = lock
        for database in (self.folder.database, self.folder.mlflow_database):
            _check_database(database)
        # MLflow commits six times a run; with a write-ahead log each costs half. The file remembers it.
        with contextlib.closing(sqlite3.connect(self.folder.mlflow_database)) as connection:
            connection.execute("PRAGMA journal_mode=wal")

    def _lease_ports(self) -> dict[str, PortLease]:
        ports: dict[str, PortLease] = {}
        for name, (usual, wanted) in {**self._ports, "client": (RAY_CLIENT_PORT, None)}.items():
            try:
                ports[name] = lease(usual, wanted)
            except PortTaken as error:
                raise CannotStart(str(error)) from None
            self._leases.append(ports[name])
        return ports

    def _start_watchdog(self, ray_folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "service.processes", self._tag, str(ray_folder), str(self.folder.logs)]
        environment = dict(self.parts[-1].environment) | {processes.VARIABLE: f"{self._tag}watchdog"}
        return subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=self.folder.root,
            start_new_session=True,
        )

    def _spawn(self, part: Part) -> None:
        if part.log.exists():
            part.log.replace(part.log.with_suffix(".previous.log"))
        with part.log.open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal is for `up`, which then stops the parts
            # in order. The folder is ours, so that no module of the user's shadows the program's.
            part.process = subprocess.Popen(  # noqa: S603 - our own command
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(part.environment),
                cwd=part.folder,
                start_new_session=True,
            )

    def _await(self, parts: Sequence[Part]) -> None:
        waiting = {part.key: part for part in parts}
        amiss = dict.fromkeys(waiting, "nothing listens yet")
        deadline = time.monotonic() + self._start_seconds
        with httpx.Client(timeout=3, trust_env=False) as client:
            while waiting:
                for part in list(waiting.values()):
                    if part.process is not None and part.process.poll() is not None:
                        raise PartFailed(part, f"did not start: it ended ({_ending(part.process)})")
                    fault = self._fault(part, client)
                    if fault is None:
                        del waiting[part.key]
                        self.tell("ready", part)
                    else:
                        amiss[part.key] = fault
                if waiting and time.monotonic() > deadline:
                    part = next(iter(waiting.values()))
                    raise PartFailed(part, f"did not start within {self._start_seconds:.0f} s ({amiss[part.key]})")
                time.sleep(0.1)

    def _fault(self, part: Part, client: httpx.Client) -> str | None:
        try:
            fault = part.health(client)
        except httpx.TransportError as error:
            return str(error) or type(error).__name__
        except ValueError:
            return "its answer is not what it should be"
        if fault is None and not processes.listens(f"{self._tag}{part.key}", part.port):
            return f"another process answers on port {part.port}"
        return fault


def log_tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _check_database(file: Path) -> None:
    """See now what MLflow would retry for two minutes before it says it.

    Raises:
        CannotStart: there is something at `file` that is not a database that can be used.
    """
    if not file.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(file, timeout=5)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise CannotStart(f"{file} cannot be used as a database: {error}") from None


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, an impatient second Ctrl-C does not cut the stopping short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, signal.SIG_IGN) for s in ENDING_SIGNALS}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
