"""What is known of a data set before it is loaded: sizes, shapes, classes, and where its files may lie.

No torch here: the service sizes a study (is the batch larger than the data?) with this.
"""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from trials.spec.folders import find_images
from trials.spec.images import NO_BYTES, content_of, reason, shape_of
from trials.spec.issues import Issue, SpecError
from trials.spec.models import DataSpec, SyntheticSpec
from trials.spec.npz import read_headers, read_labels
from trials.spec.roots import MOST_BYTES, check_link, confined_file, confined_folder, path_error

IMAGE_COLUMNS = ("image", "img")
_MOST_CLASSES = 100_000
LABEL_COLUMNS = ("label", "fine_label", "labels")

ONE_CLASS = "all training labels are 0; a data set needs at least two classes"


class Fetched(NamedTuple):
    """A data set that torchvision fetches, with a test split of its own."""

    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int


FETCHED = {
    "mnist": Fetched(60_000, 10_000, (1, 28, 28), 10),
    "fashion_mnist": Fetched(60_000, 10_000, (1, 28, 28), 10),
    "cifar10": Fetched(50_000, 10_000, (3, 32, 32), 10),
    "cifar100": Fetched(50_000, 10_000, (3, 32, 32), 100),
}


@dataclass(frozen=True)
class DataFacts:
    """Sizes of a data set as a `DataSpec` splits it."""

    train_available: int  # training samples in the data set, before `train_samples` and the validation split
    train: int
    validation: int
    test: int
    features: int  # values per sample, the product of the shape
    classes: int
    shape: tuple[int, int, int] = (0, 0, 0)  # (channels, height, width) of one sample

    def __post_init__(self) -> None:
        """Facts kept as JSON come back with a list, and those of the first studies with no shape."""
        shape = tuple(self.shape) if any(self.shape) else (1, 1, self.features)
        object.__setattr__(self, "shape", shape)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON gives them back: `DataFacts(**facts.as_json()) == facts`."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class ParquetFiles:
    """The files of one Hugging Face-style image data set and the columns to read."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    image_column: str
    label_column: str


def facts_for(data: DataSpec, roots: Sequence[Path]) -> DataFacts:
    """Facts of the data set, from as little of it as will do.

    Of `parquet` and `npz` the training labels are read and no inputs; of `images` the first image's size.

    Args:
        data: what is asked for.
        roots: the folders under which the path of `parquet`, `npz` and `images` may lie.

    Raises:
        SpecError: where the path is outside the roots, or holds no such data set, or it is too large.
    """
    if data.dataset == "digits":
        return _facts_without_test_split(data, 1797, (1, 8, 8), 10)
    if data.dataset == "synthetic":
        asked = synthetic_spec(data)
        return _facts_without_test_split(data, asked.samples, (1, 1, asked.features), asked.classes)
    if data.dataset == "parquet":
        return _parquet_facts(data, find_parquet(data, roots))
    if data.dataset == "npz":
        return _npz_facts(data, confined_file(data.path, roots))
    if data.dataset == "images":
        return _folder_facts(data, roots)
    return _facts(data, *FETCHED[data.dataset])


def synthetic_spec(data: DataSpec) -> SyntheticSpec:
    """What a synthetic data set draws, defaults filled in.

    Raises:
        SpecError: where it would be larger than `MOST_BYTES`.
    """
    asked = data.synthetic or SyntheticSpec()
    size = 4 * asked.samples * asked.features
    if size > MOST_BYTES:
        detail = (
            f"{asked.samples:,} samples of {asked.features:,} features take {size / 2**30:,.1f} GiB, and at most "
            f"{MOST_BYTES / 2**30:.0f} GiB are drawn; ask for fewer of either"
        )
        raise SpecError([Issue("/data/synthetic", detail)])
    return asked


def find_parquet(data: DataSpec, roots: Sequence[Path]) -> ParquetFiles:
    """Locate the `train*.parquet` and `test*.parquet` files of `data.path`.

    A relative path is looked for under each root in turn. Symbolic links are followed first,
    so that none leads out of the roots.

    Raises:
        SpecError: with pointer `/data/path`.
    """
    folder = confined_folder(data.path, roots)
    train, test = _files(folder, "train", roots), _files(folder, "test", roots)
    with _told(f"{train[0].name} cannot be read as Parquet", folder):
        columns = pq.read_schema(train[0]).names
    image = next((c for c in IMAGE_COLUMNS if c in columns), None)
    label = next((c for c in LABEL_COLUMNS if c in columns), None)
    if image is None or label is None:
        raise path_error(
            f"{train[0].name} needs an image column ({' or '.join(IMAGE_COLUMNS)}) and a label column "
            f"({' or '.join(LABEL_COLUMNS)}); it has {', '.join(columns)}"
        )
    return ParquetFiles(train, test, image, label)


def split_sizes(data: DataSpec, train_available: int) -> tuple[int, int]:
    """Sizes of the (training, validation) splits."""
    kept = min(train_available, data.train_samples or train_available)
    validation = min(kept, max(1, round(kept * data.validation_fraction)))
    return kept - validation, validation


def test_size(data: DataSpec, samples: int) -> int:
    """Size of the test split that is drawn where a data set of `samples` has none of its own."""
    return max(1, round(samples * data.test_fraction))


def _facts(data: DataSpec, train_available: int, test: int, shape: tuple[int, int, int], classes: int) -> DataFacts:
    train, validation = split_sizes(data, train_available)
    return DataFacts(train_available, train, validation, test, math.prod(shape), classes, shape)


def _facts_without_test_split(data: DataSpec, samples: int, shape: tuple[int, int, int], classes: int) -> DataFacts:
    test = test_size(data, samples)
    return _facts(data, samples - test, test, shape, classes)


def _npz_facts(data: DataSpec, file: Path) -> DataFacts:
    try:
        headers = read_headers(file)
        classes = int(read_labels(file, "y_train").max()) + 1
    except ValueError as error:
        raise path_error(f"{file.name}: {reason(error, file.parent)}") from None
    if classes < 2:
        raise path_error(f"{file.name}: {ONE_CLASS}")
    if classes > _MOST_CLASSES:
        raise path_error(
            f"{file.name}: y_train has label {classes - 1}; labels must be 0 … C−1, C at most {_MOST_CLASSES}"
        )
    return _facts(data, headers.train, headers.test, headers.shape, classes)


def _folder_facts(data: DataSpec, roots: Sequence[Path]) -> DataFacts:
    folder = find_images(data, roots)
    first = folder.train[0][0]
    with _told(f"the image {first.relative_to(folder.path)} cannot be read", folder.path), first.open("rb") as stream:
        shape = shape_of(stream)
    size = math.prod(shape) * (min(len(folder.train), data.train_samples or len(folder.train)) + len(folder.test))
    if size > MOST_BYTES:
        raise path_error(
            f"these images would take {size / 2**30:,.1f} GiB once decoded, and at most "
            f"{MOST_BYTES / 2**30:.0f} GiB are read; make them smaller or use fewer"
        )
    return _facts(data, len(folder.train), len(folder.test), shape, len(folder.classes))


def _parquet_facts(data: DataSpec, files: ParquetFiles) -> DataFacts:
    rows: dict[Path, int] = {}
    labels: list[pa.ChunkedArray] = []
    for file in (*files.train, *files.test):
        with _told(f"{file.name} cannot be read", file.parent):
            rows[file] = pq.read_metadata(file).num_rows
            if file in files.train:
                labels.append(pq.read_table(file, columns=[files.label_column]).column(0))
    for split in (files.train, files.test):
        if not any(rows[file] for file in split):
            raise path_error(f"{split[0].name}: no rows")
    first = next(file for file in files.train if rows[file])
    with _told(f"{first.name}, row 0: the image cannot be read", first.parent):
        batch = next(pq.ParquetFile(first).iter_batches(batch_size=1, columns=[files.image_column]))
        content = content_of(batch.column(0)[0].as_py())
        if content is None:
            raise ValueError(NO_BYTES)
        shape = shape_of(io.BytesIO(content))
    train, test = (sum(rows[file] for file in split) for split in (files.train, files.test))
    return _facts(data, train, test, shape, _count_classes(labels))


@contextmanager
def _told(what: str, folder: Path) -> Iterator[None]:
    """Whatever goes wrong with a file of `folder`, as a `SpecError`: damaged bytes meet many parsers."""
    try:
        yield
    except Exception as error:
        raise path_error(f"{what}: {reason(error, folder)}") from None


def _count_classes(columns: Sequence[pa.ChunkedArray]) -> int:
    """Labels are class numbers from 0; at least one column has some."""
    for column in columns:
        if not pa.types.is_integer(column.type) or column.null_count:
            raise path_error(
                f"labels must be whole numbers, one for each image, not {column.type} with {column.null_count} nulls"
            )
    filled = [column.to_numpy() for column in columns if len(column)]
    lowest, highest = min(int(labels.min()) for labels in filled), max(int(labels.max()) for labels in filled)
    if lowest < 0 or highest >= _MOST_CLASSES:
        raise path_error(f"labels must be 0 … C−1 (C at most {_MOST_CLASSES}); these go from {lowest} to {highest}")
    if highest == 0:
        raise path_error(ONE_CLASS)
    return highest + 1


def _files(folder: Path, split: str, roots: Sequence[Path]) -> tuple[Path, ...]:
    found = tuple(sorted(folder.glob(f"{split}*.parquet")))
    if not found:
        raise path_error(f"no {split}*.parquet in {folder.name!r}")
    for file in found:
        check_link(file, roots)
    return found
