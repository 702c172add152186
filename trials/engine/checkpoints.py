"""Checkpoints of a pack as bytes: a JSON header and arrays in NumPy's own format. Nothing in them is executed."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

_HEADER = "header"
_ARRAY = "array/"


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs elsewhere; the pack can be trained from its start instead."""


def encode(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """One file's content; floats come back to the last bit."""
    text = np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)
    named: dict[str, Any] = {_ARRAY + name: array for name, array in arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **{_HEADER: text}, **named)
    return buffer.getvalue()


def decode(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays.

    Raises:
        CheckpointError: where the content is damaged.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            header = json.loads(file[_HEADER].tobytes())
            arrays = {name.removeprefix(_ARRAY): file[name] for name in file.files if name.startswith(_ARRAY)}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"the checkpoint is damaged: {error!r}") from error
    return header, arrays
