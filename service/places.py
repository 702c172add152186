"""The folder of an embedded stack: what lies where, and which stack is running in it now."""

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil


def default_data_dir() -> Path:
    """`$NORMSTUDY_HOME`, else `normstudy` under the XDG data home."""
    if home := os.environ.get("NORMSTUDY_HOME"):
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base).absolute() / "normstudy"


def demo_data_dir() -> Path:
    """Folder of `normstudy demo`, unless the user says another."""
    return default_data_dir() / "demo"


@dataclass(frozen=True)
class DataFolder:
    """Paths under one data folder. Everything a user's studies consist of is here, and stays."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "stack.lock"

    @property
    def state(self) -> Path:
        return self.root / "stack.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def studies(self) -> Path:
        return self.root / "studies"

    @property
    def database(self) -> Path:
        return self.root / "normstudy.db"

    @property
    def mlflow_database(self) -> Path:
        return self.root / "mlflow" / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        return self.root / "mlflow" / "artifacts"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def create(self) -> None:
        """Make the folders, readable by their owner only.

        Raises:
            OSError: a folder cannot be made or written.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.logs, self.studies, self.mlflow_artifacts, self.data, self.cache):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True)
class StackState:
    """What `stack.json` says of the stack that was started last.

    `pid` and `pid_created` (seconds since the epoch, as psutil gives them) name the process
    that owns it; a pid alone could have been given to another process since.
    """

    tag: str
    pid: int
    pid_created: float
    started_at: str
    api: str
    ray_dashboard: str
    mlflow: str
    ray_folder: str
    ready: bool = False

    @classmethod
    def of_this_process(cls, tag: str, *, api: str, ray_dashboard: str, mlflow: str, ray_folder: Path) -> "StackState":
        me = psutil.Process()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(tag, me.pid, me.create_time(), now, api, ray_dashboard, mlflow, str(ray_folder))

    def now_ready(self) -> "StackState":
        return replace(self, ready=True)

    def owner_lives(self) -> bool:
        try:
            owner = psutil.Process(self.pid)
            return owner.status() != psutil.STATUS_ZOMBIE and abs(owner.create_time() - self.pid_created) < 1
        except psutil.Error:
            return False


def write_state(folder: DataFolder, state: StackState) -> None:
    """Replace `stack.json` in one step."""
    draft = folder.state.with_suffix(".json.new")
    draft.write_text(json.dumps(asdict(state), indent=2) + "\n")
    draft.replace(folder.state)


def read_state(folder: DataFolder) -> StackState | None:
    """The last stack's state; None if there is none, or if the file is not one of ours."""
    try:
        document: Any = json.loads(folder.state.read_text())
        return StackState(**document)
    except (OSError, ValueError, TypeError):
        return None


def running_stack(data_dir: Path) -> StackState | None:
    """The stack that runs in this folder now, if one does."""
    state = read_state(DataFolder(data_dir))
    return state if state is not None and state.owner_lives() else None
