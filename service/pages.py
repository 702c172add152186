"""Opaque page tokens: where a listing goes on, bound to the listing it was made for."""

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from service.problems import Invalid
from trials.spec import Issue

_LONGEST = 500


def encode_token(listing: Sequence[Any], position: Sequence[str | int]) -> str:
    """A token for the entries after `position` of a listing (its path and filters)."""
    text = json.dumps([_digest(listing), *position], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str, listing: Sequence[Any], kinds: Sequence[type]) -> list[Any]:
    """The position in a token.

    Args:
        kinds: type of each part of the position.

    Raises:
        Invalid: not a token, or one of another listing.
    """
    try:
        if len(token) > _LONGEST:
            raise ValueError
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        digest, *position = json.loads(raw)
        for part in position:
            str(part).encode()  # a lone surrogate, which JSON can spell, is no text that a database takes
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise not_ours() from None
    if len(position) != len(kinds) or any(type(p) is not k for p, k in zip(position, kinds, strict=True)):
        raise not_ours()
    if digest != _digest(listing):
        raise _refused("belongs to another listing; keep the filters of the first page")
    return position


def _digest(listing: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(listing)).encode()).hexdigest()[:12]


def not_ours() -> Invalid:
    return _refused("is not a token that this service gave out")


def _refused(detail: str) -> Invalid:
    return Invalid(f"page_token {detail}", [Issue("?page_token", detail)])
