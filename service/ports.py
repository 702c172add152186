"""Free TCP ports on loopback, held against other stacks that choose at the same moment."""

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
TRIES = 200
"""Neighbours tried after a usual port: 8080, 8081, …"""


class PortTaken(Exception):
    """A port that was asked for by number is in use."""


class PortLease:
    """A port that is free, and that no other stack of this user will choose while this object lives.

    Between the choice of a port and the moment a server listens on it, seconds pass in which
    another `normstudy up` would find it free too. A locked file per port closes that gap.
    """

    def __init__(self, port: int, claim: IO[bytes]):
        self.port = port
        self._claim = claim

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def release(self) -> None:
        self._claim.close()


def lease(usual: int, wanted: int | None = None) -> PortLease:
    """Lease `wanted`, or the first free port from `usual` upwards.

    The search stays below the range that the kernel gives to outgoing connections, where a
    port that is free now may be taken a moment later by anyone.

    Raises:
        PortTaken: `wanted` is in use, or no port near `usual` is free.
    """
    for port in [wanted] if wanted is not None else range(usual, usual + TRIES):
        claim = _claim(port)
        if claim is None:
            continue
        if is_free(port):
            return PortLease(port, claim)
        claim.close()
    if wanted is not None:
        raise PortTaken(f"port {wanted} is taken; give another, or leave the choice to Normstudy")
    raise PortTaken(f"no port between {usual} and {usual + TRIES - 1} is free")


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a stopped server that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def _claim(port: int) -> IO[bytes] | None:
    folder = Path(tempfile.gettempdir()) / f"normstudy-ports-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        claim = (folder / str(port)).open("ab")
    except OSError:  # no place for leases (a full or foreign folder): the gap stays open, no more
        return Path(os.devnull).open("ab")
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        claim.close()
        return None
    return claim
