"""Image folders: which files are the samples of which class. Names only; no image is read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.spec.images import reason
from trials.spec.models import DataSpec
from trials.spec.roots import MOST_SAMPLES, check_link, confined_folder, path_error

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})


@dataclass(frozen=True)
class ImageFolder:
    """The files of one data set with their class numbers, by class and then by name."""

    path: Path
    classes: tuple[str, ...]  # folder names in sorted order: class 0, 1, …
    train: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]


def find_images(data: DataSpec, roots: Sequence[Path]) -> ImageFolder:
    """List `train/<class>/*` and `test/<class>/*` of `data.path`.

    Hidden files and folders are passed over. Symbolic links are followed, and none may lead out of
    the roots.

    Raises:
        SpecError: with pointer `/data/path`, where the path is outside the roots, a folder is missing or
            empty, there is something else than images, or the test split has a class of its own.
    """
    path = confined_folder(data.path, roots)
    try:
        return _find(path, roots)
    except OSError as error:
        place = str(error.filename).removeprefix(f"{path}/")
        raise path_error(f"{place} cannot be read: {reason(error, path)}") from None


def _find(path: Path, roots: Sequence[Path]) -> ImageFolder:
    folders = {split: _class_folders(path, split, roots) for split in ("train", "test")}
    classes = tuple(entry.name for entry in folders["train"])
    if not classes:
        raise path_error("train has no folders; put images into train/<class>/")
    number = {name: index for index, name in enumerate(classes)}
    for entry in folders["test"]:
        if entry.name not in number:
            raise path_error(f"test/{entry.name} has no counterpart in train; its classes are {_some(classes)}")
    train = _images(folders["train"], number, "train", roots)
    test = _images(folders["test"], number, "test", roots)
    filled = {label for _, label in train}
    for name in classes:
        if number[name] not in filled:
            raise path_error(f"train/{name} has no images; put some there or remove it")
    if len(classes) == 1:
        raise path_error(f"train has one class only, {classes[0]}; a data set needs at least two")
    if not test:
        raise path_error(f"test has no images; put some into test/<class>/, with the classes {_some(classes)}")
    return ImageFolder(path, classes, train, test)


def _class_folders(path: Path, split: str, roots: Sequence[Path]) -> list[Path]:
    place = path / split
    if not place.is_dir():
        raise path_error(f"no folder {split!r} in {path.name!r}; images are read from train/<class>/ and test/<class>/")
    check_link(place, roots)
    folders = _entries(place, roots)
    for folder in folders:
        if not folder.is_dir():
            raise path_error(f"{split}/{folder.name} is not a folder; put images into {split}/<class>/")
    return folders


def _images(
    folders: Sequence[Path], number: dict[str, int], split: str, roots: Sequence[Path]
) -> tuple[tuple[Path, int], ...]:
    found: list[tuple[Path, int]] = []
    for folder in folders:
        for file in _entries(folder, roots):
            if file.suffix.lower() not in SUFFIXES or not file.is_file():
                known = ", ".join(sorted(SUFFIXES))
                raise path_error(
                    f"{split}/{folder.name}/{file.name} is not an image file ({known}); convert or remove it"
                )
            found.append((file, number[folder.name]))
        if len(found) > MOST_SAMPLES:
            raise path_error(f"{split} has more than {MOST_SAMPLES:,} images; keep fewer")
    return tuple(found)


def _entries(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """What is in a folder and not hidden, sorted by name."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink():
                check_link(Path(entry.path), roots)
            found.append(Path(entry.path))
    return sorted(found)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
