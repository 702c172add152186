"""What an encoded image says of itself before it is decoded: its mode and size."""

from pathlib import Path
from typing import IO

MODES = ("L", "LA", "RGB", "RGBA")
"""Modes that are read: eight bits per channel, and the value is the intensity."""

NO_BYTES = "no image bytes (images kept as separate files are not supported)"


def mode_fault(mode: str) -> str | None:
    """What is wrong with images of a mode, in words; None where nothing is."""
    return None if mode in MODES else f"image mode {mode} is not one of {', '.join(MODES)}"


def content_of(value: object) -> bytes | None:
    """The encoded image in a value of an image column (bytes, or a struct with a field `bytes`), if it has one."""
    content = value.get("bytes") if isinstance(value, dict) else value
    return content if isinstance(content, bytes) else None


def shape_of(stream: IO[bytes]) -> tuple[int, int, int]:
    """(channels, height, width) of an encoded image, which is not decoded.

    Raises:
        ValueError: its mode or its format is none that is read.
        OSError, SyntaxError, Image.DecompressionBombError: it is damaged, or too large.
    """
    from PIL import Image, UnidentifiedImageError  # only for images

    try:
        with Image.open(stream) as image:
            if fault := mode_fault(image.mode):
                raise ValueError(fault)
            return len(image.getbands()), image.height, image.width
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None


def reason(error: Exception, folder: Path) -> str:
    """What an error says, with files called by their path in `folder`: where that lies is the operator's business."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).replace(f"{folder}/", "")
