"""What a command line names: the service to talk to, and the study to submit.

As in `service.cli`, whatever is needed is imported where it is needed.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from service.client import Media

SOURCE = "FILE|PRESET"


@dataclass(frozen=True)
class Address:
    """A service's URL, and what it is known from, for the user."""

    url: str
    source: str

    def __str__(self) -> str:
        return f"{self.url} ({self.source})"


def find_service(url: str | None) -> Address:
    """The service that the user means: the one that was named, else a stack of theirs that runs.

    A usual port is not tried: whatever listens there may be another user's.

    Raises:
        NoServiceKnown: none was named, and none runs.
    """
    if url is not None:
        return Address(url, "--url")
    if url := os.environ.get("NORMSTUDY_URL", "").strip():
        return Address(url, "NORMSTUDY_URL")
    from service.client import NoServiceKnown
    from service.places import default_data_dir, demo_data_dir, running_stack

    folders = [default_data_dir(), demo_data_dir()]
    for folder in folders:
        if stack := running_stack(folder):
            return Address(stack.api, f"the stack of {folder}")
    raise NoServiceKnown(folders)


def read_document(source: str) -> "tuple[bytes, Media]":
    """The study to submit: standard input, a file, or a preset. No service is asked.

    Raises:
        typer.BadParameter: there is no such file or preset, or nothing in it.
    """
    document, suffix = _content(source)
    if not document.strip():
        raise _bad(f"{'standard input' if source == '-' else repr(source)} is empty; a study document is needed")
    is_json = suffix == ".json" or (not suffix and document.lstrip()[:1] == b"{")
    return document, "application/json" if is_json else "application/yaml"


def _content(source: str) -> tuple[bytes, str]:
    """The document's bytes, and the ending of its name in lower case."""
    if source == "-":
        return sys.stdin.buffer.read(), ""
    path = Path(source)
    try:
        return path.read_bytes(), path.suffix.lower()
    except FileNotFoundError:
        return _preset(source).encode(), ".yaml"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise _bad(f"cannot read {source!r}: {getattr(error, 'strerror', None) or error}") from None


def _preset(name: str) -> str:
    from trials.spec import nearest, preset_names, preset_text

    known = preset_names()
    if name in known:
        return preset_text(name)
    if os.sep in name or Path(name).suffix in {".yaml", ".yml", ".json"}:
        raise _bad(f"there is no file {name!r}")
    guess = nearest(name, known)
    hint = f"did you mean {guess!r}?" if guess else f"the presets are: {', '.join(known)}"
    raise _bad(f"there is no file {name!r}, and no preset of that name; {hint}")


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=SOURCE)
