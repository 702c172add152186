"""Encoded images of one size and mode, decoded."""

import io
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from trials.engine.errors import DataError
from trials.spec.images import mode_fault


class Form(NamedTuple):
    """What all images of a data set must share."""

    mode: str
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}×{self.height} {self.mode}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return Image.getmodebands(self.mode), self.height, self.width


class Decoder:
    """Decodes images one by one into an array, and holds each against the form of the first.

    Attributes:
        values: uint8 [images, channels, height · width]; there once the first is decoded.
        form: taken from the first image, or given.
    """

    def __init__(self, images: int, form: Form | None = None):
        self._images = images
        self.form = form
        self.values: np.ndarray | None = None

    def decode(self, place: int, content: bytes, name: str) -> None:
        """Decode one image into `values[place]`.

        Args:
            place: its row in `values`.
            content: the encoded image.
            name: what it is called in messages.

        Raises:
            DataError: where it cannot be decoded or is not of the form.
        """
        try:
            image = Image.open(io.BytesIO(content))
            image.load()
        except UnidentifiedImageError as error:
            raise DataError(f"{name}: the image cannot be decoded: its format is not known") from error
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{name}: the image cannot be decoded: {error}") from error
        if fault := mode_fault(image.mode):
            raise DataError(f"{name}: {fault}")
        own = Form(image.mode, image.width, image.height)
        self.form = self.form or own
        if own != self.form:
            raise DataError(f"{name}: the image is {own}, the ones before it {self.form}; all must be alike")
        channels, height, width = own.shape
        if self.values is None:
            self.values = np.empty((self._images, channels, height * width), np.uint8)
        self.values[place] = np.asarray(image).reshape(height * width, channels).T

    def decoded(self) -> tuple[np.ndarray, Form]:
        """All images, [images, channels, height · width], and their form; at least one has been decoded."""
        assert self.values is not None
        assert self.form is not None
        return self.values, self.form
