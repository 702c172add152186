"""Image folders: `train/<class>/` and `test/<class>/`, one file per image, the classes in sorted order."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trials.engine.errors import DataError
from trials.engine.images import Decoder, Form
from trials.engine.samples import Samples, Splits, splitter
from trials.spec.folders import ImageFolder, find_images
from trials.spec.models import DataSpec


def read(data: DataSpec, roots: Sequence[Path]) -> Splits:
    """Read the data set and split it; only images that are used are decoded.

    Raises:
        SpecError: where the path is outside the roots or holds no such folders.
        DataError: where an image cannot be decoded, or is not of the size and mode of the others.
    """
    folder = find_images(data, roots)
    train, validation = splitter(data)(len(folder.train))
    chosen = [folder.train[row] for row in (*train, *validation)]
    images, form = _read_images(folder, chosen)
    test_images, _ = _read_images(folder, folder.test, form)
    labels, test_labels = (np.array([label for _, label in files], np.int64) for files in (chosen, folder.test))
    cut = len(train)
    return Splits(
        Samples(images[:cut], labels[:cut]),
        Samples(images[cut:], labels[cut:]),
        Samples(test_images, test_labels),
        form.shape,
        len(folder.classes),
    )


def _read_images(
    folder: ImageFolder, files: Sequence[tuple[Path, int]], form: Form | None = None
) -> tuple[np.ndarray, Form]:
    decoder = Decoder(len(files), form)
    for place, (file, _) in enumerate(files):
        name = str(file.relative_to(folder.path))
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"{name}: the image cannot be read: {error}") from error
        decoder.decode(place, content, name)
    return decoder.decoded()
