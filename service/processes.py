"""Finds and ends exactly the processes that one stack started, however deep or orphaned.

Every process of a stack carries `NORMSTUDY_STACK=<folder>:<start>:<part>` in its environment and
hands it on to what it starts. A parent's pid is not enough to find them: Ray's agents and workers
outlive a killed raylet and are then nobody's children.

Run as a module, this is the stack's watchdog: it waits until its standard input closes, which
happens when `up` ends in any way, `kill -9` included, and then ends what is left of that start.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

VARIABLE = "NORMSTUDY_STACK"
RAY_FOLDER_PREFIX = "normstudy-ray-"
RAY_SESSIONS = "r"
"""Folder in a stack's Ray folder that is given to Ray; short, for the sockets in it."""


def folder_tag(data_dir: Path) -> str:
    """The first part of the tag of every stack on this data folder, whichever start it was."""
    return hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12] + ":"


def new_tag(data_dir: Path) -> str:
    """The tag of one start of a stack; a part's own tag is this and the part's name."""
    return f"{folder_tag(data_dir)}{secrets.token_hex(4)}:"


def tagged(prefix: str) -> Iterator[psutil.Process]:
    """Living processes whose tag begins with `prefix`, this one and its ancestors left out.

    Processes of other users cannot be looked into and are passed over.
    """
    me = psutil.Process()
    family = {me.pid, *(p.pid for p in me.parents())}
    for process in psutil.process_iter():
        if process.pid in family:
            continue
        try:
            tag = process.environ().get(VARIABLE, "")
            if tag.startswith(prefix) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, OSError):
            continue


def end(prefix: str, *, grace: float = 5.0, spare: Collection[int] = ()) -> int:
    """End every process tagged `prefix`: SIGTERM, up to `grace` seconds, then SIGKILL.

    Looks again after each round, since a dying parent may have started a child meanwhile.

    Returns:
        How many processes were told to end.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    give_up = deadline + 10  # a process in an uninterruptible wait does not die even of SIGKILL
    while time.monotonic() < give_up:
        left = [p for p in tagged(prefix) if p.pid not in spare]
        if not left:
            break
        overdue = time.monotonic() >= deadline
        for process in left:
            try:
                if overdue:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
            except psutil.Error:
                continue
            asked.add(process.pid)
        time.sleep(0.1)
    return len(asked)


def listens(prefix: str, port: int) -> bool:
    """Whether a process tagged `prefix` listens on this TCP port."""
    for process in tagged(prefix):
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections):
            return True
    return False


def retire_ray_folder(folder: str | Path, logs: str | Path) -> None:
    """Keep what a user may want of a stopped Ray's temporary folder, and remove the folder.

    Kept are the output of each study's driver (`logs/jobs/`) and Ray's own logs of its last start
    (`logs/ray/`). A folder that is not a stack's Ray is left alone.
    """
    path = Path(folder)
    if not path.name.startswith(RAY_FOLDER_PREFIX) or not path.is_dir() or path.is_symlink():
        return
    kept = {"jobs": ["job-driver-*.log"], "ray": ["gcs_server*", "raylet*", "dashboard*.log", "monitor*"]}
    for name, patterns in kept.items():
        target = Path(logs) / name
        for pattern in patterns:
            for log in path.glob(f"{RAY_SESSIONS}/session_2*/logs/{pattern}"):
                with contextlib.suppress(OSError):  # a full disk must not keep the rest from stopping
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(log, target / log.name)
    shutil.rmtree(path, ignore_errors=True)


def _watch(tag: str, ray_folder: str, logs: str) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    end(tag)
    retire_ray_folder(ray_folder, logs)


if __name__ == "__main__":
    _watch(*sys.argv[1:4])
