"""What is known of a data set before it is loaded: sizes, shapes, classes, and where its files may lie.

No torch here: the service sizes a study (is the batch larger than the data?) with this.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trials.spec.issues import Issue, SpecError
from trials.spec.models import DataSpec

IMAGE_COLUMNS = ("image", "img")
_MOST_CLASSES = 100_000
LABEL_COLUMNS = ("label", "fine_label", "labels")


@dataclass(frozen=True)
class DataFacts:
    """Sizes of a data set as a `DataSpec` splits it."""

    train_available: int  # training samples in the data set, before `train_samples` and the validation split
    train: int
    validation: int
    test: int
    features: int  # values per sample
    classes: int


@dataclass(frozen=True)
class ParquetFiles:
    """The files of one Hugging Face-style image data set and the columns to read."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    image_column: str
    label_column: str


def facts_for(data: DataSpec, roots: Sequence[Path]) -> DataFacts:
    """Facts of the data set; `roots` are the folders under which a `parquet` path may lie.

    Raises:
        SpecError: where the path is outside the roots, or holds no such data set.
    """
    if data.dataset == "digits":
        total = 1797
        test = max(1, round(total * data.test_fraction))
        return _split(data, total - test, test, features=64, classes=10)
    if data.dataset == "cifar10":
        return _split(data, 50_000, 10_000, features=3072, classes=10)
    return _parquet_facts(data, find_parquet(data, roots))


def find_parquet(data: DataSpec, roots: Sequence[Path]) -> ParquetFiles:
    """Locate the `train*.parquet` and `test*.parquet` files of `data.path`.

    A relative path is looked for under each root in turn. Symbolic links are followed first,
    so that none leads out of the roots.

    Raises:
        SpecError: with pointer `/data/path`.
    """
    folder = _confined(data.path or "", roots)
    train, test = _files(folder, "train", roots), _files(folder, "test", roots)
    try:
        columns = pq.read_schema(train[0]).names
    except Exception as error:
        raise _path_error(f"{train[0].name} cannot be read as Parquet: {error}") from None
    image = next((c for c in IMAGE_COLUMNS if c in columns), None)
    label = next((c for c in LABEL_COLUMNS if c in columns), None)
    if image is None or label is None:
        raise _path_error(
            f"{train[0].name} needs an image column ({' or '.join(IMAGE_COLUMNS)}) and a label column "
            f"({' or '.join(LABEL_COLUMNS)}); it has {', '.join(columns)}"
        )
    return ParquetFiles(train, test, image, label)


def split_sizes(data: DataSpec, train_available: int) -> tuple[int, int]:
    """Sizes of the (training, validation) splits."""
    kept = min(train_available, data.train_samples or train_available)
    validation = min(kept, max(1, round(kept * data.validation_fraction)))
    return kept - validation, validation


def _split(data: DataSpec, train_available: int, test: int, features: int, classes: int) -> DataFacts:
    train, validation = split_sizes(data, train_available)
    return DataFacts(train_available, train, validation, test, features, classes)


def _parquet_facts(data: DataSpec, files: ParquetFiles) -> DataFacts:
    from PIL import Image  # only this data set kind needs it

    try:
        train = sum(pq.read_metadata(f).num_rows for f in files.train)
        test = sum(pq.read_metadata(f).num_rows for f in files.test)
        labels = [pq.read_table(f, columns=[files.label_column]).column(0) for f in files.train]
        batch = next(pq.ParquetFile(files.train[0]).iter_batches(batch_size=1, columns=[files.image_column]))
        first = batch.column(0)[0].as_py()
        with Image.open(io.BytesIO(first["bytes"])) as image:
            features = image.width * image.height * len(image.getbands())
        classes = _count_classes(labels)
    except SpecError:
        raise
    except Exception as error:
        raise _path_error(f"the image data set in {data.path!r} cannot be read: {error}") from None
    return _split(data, train, test, features, classes)


def _count_classes(columns: Sequence[pa.ChunkedArray]) -> int:
    """Labels are class numbers from 0."""
    for column in columns:
        if not pa.types.is_integer(column.type) or column.null_count:
            raise _path_error(
                f"labels must be whole numbers, one for each image, not {column.type} with {column.null_count} nulls"
            )
    lowest = min(int(column.to_numpy().min()) for column in columns)
    highest = max(int(column.to_numpy().max()) for column in columns)
    if lowest < 0 or highest >= _MOST_CLASSES:
        raise _path_error(f"labels must be 0 … C−1 (C at most {_MOST_CLASSES}); these go from {lowest} to {highest}")
    return highest + 1


def _confined(path: str, roots: Sequence[Path]) -> Path:
    real_roots = [root.resolve() for root in roots]
    for root in real_roots:
        try:
            candidate = (root / path).resolve()  # an absolute path replaces the root, and is checked all the same
            if any(candidate.is_relative_to(r) for r in real_roots) and candidate.is_dir():
                return candidate
        except (OSError, ValueError):  # a name too long, a null byte, a loop of links: no such folder
            continue
    raise _path_error(f"no folder {path!r} under the allowed data roots; ask the operator which roots are set")


def _files(folder: Path, split: str, roots: Sequence[Path]) -> tuple[Path, ...]:
    found = tuple(sorted(folder.glob(f"{split}*.parquet")))
    if not found:
        raise _path_error(f"no {split}*.parquet in {folder.name!r}")
    for file in found:
        if not any(file.resolve().is_relative_to(root.resolve()) for root in roots):
            raise _path_error(f"{file.name} is a link that leads outside the allowed data roots")
    return found


def _path_error(detail: str) -> SpecError:
    return SpecError([Issue("/data/path", detail)])
