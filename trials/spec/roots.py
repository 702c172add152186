"""Paths a user may name: only what lies, once links are followed, under the data roots of the operator."""

from collections.abc import Sequence
from pathlib import Path

from trials.spec.issues import Issue, SpecError

MOST_BYTES = 8 * 2**30
"""Largest data set that is read, in bytes as it comes out of its files: what a small file claims to unpack to."""

MOST_SAMPLES = 10_000_000
"""Most samples of one split."""


def confined_folder(path: str | None, roots: Sequence[Path]) -> Path:
    """The folder at `path`, links followed; a relative path is looked for under each root in turn.

    Raises:
        SpecError: with pointer `/data/path`, where there is no such folder under the roots.
    """
    for candidate in _candidates(path, roots):
        if candidate.is_dir():
            return candidate
    raise path_error(f"no folder {path!r} under the allowed data roots; ask the operator which roots are set")


def confined_file(path: str | None, roots: Sequence[Path]) -> Path:
    """The file at `path`, as `confined_folder` finds a folder.

    Raises:
        SpecError: with pointer `/data/path`, where there is no such file under the roots.
    """
    for candidate in _candidates(path, roots):
        if candidate.is_file():
            return candidate
    raise path_error(f"no file {path!r} under the allowed data roots; ask the operator which roots are set")


def check_link(file: Path, roots: Sequence[Path]) -> None:
    """Refuse a file or folder that leads out of the roots once its links are followed.

    Raises:
        SpecError: with pointer `/data/path`.
    """
    try:
        is_inside = any(file.resolve().is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError):  # a loop of links
        is_inside = False
    if not is_inside:
        raise path_error(f"{file.name} is a link that leads outside the allowed data roots")


def path_error(detail: str) -> SpecError:
    return SpecError([Issue("/data/path", detail)])


def _candidates(path: str | None, roots: Sequence[Path]) -> list[Path]:
    real_roots = [root.resolve() for root in roots]
    found = []
    for root in real_roots:
        try:
            candidate = (root / (path or "")).resolve()  # an absolute path replaces the root, and is checked alike
            candidate.stat()
        except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, a loop of links: nothing there
            continue
        if any(candidate.is_relative_to(r) for r in real_roots):
            found.append(candidate)
    return found
