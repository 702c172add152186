"""Checkpoints of a pack as bytes: a JSON header and arrays in NumPy's own format. Nothing in them is executed."""

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_HEADER = "header"
_ARRAY = "array/"
_MAGIC = b"normstudy checkpoint 1\n"
_DIGEST = hashlib.sha256().digest_size


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs elsewhere; the pack can be trained from its start instead."""


def encode(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """One file's content; floats come back to the last bit."""
    text = np.frombuffer(json.dumps(header, allow_nan=False).encode(), np.uint8)
    named: dict[str, Any] = {_ARRAY + name: array for name, array in arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **{_HEADER: text}, **named)
    content = buffer.getvalue()
    return _MAGIC + hashlib.sha256(content).digest() + content


def decode(checkpoint: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays.

    Raises:
        CheckpointError: where the content is not what was written.
    """
    start = len(_MAGIC) + _DIGEST
    content = checkpoint[start:]
    if not checkpoint.startswith(_MAGIC) or checkpoint[len(_MAGIC) : start] != hashlib.sha256(content).digest():
        raise CheckpointError("the checkpoint is damaged, or another version's")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        header = json.loads(file[_HEADER].tobytes())
        return header, {name.removeprefix(_ARRAY): file[name] for name in file.files if name.startswith(_ARRAY)}
