"""The part of the study document that says what is trained on."""

from typing import Annotated, Literal

from pydantic import Field

from trials.spec.base import Seed, Strict, UnsignedZero


class SyntheticSpec(Strict):
    """Gaussian classes whose inputs differ in length: the sample-wise factor ‖x‖² + 1, made to measure."""

    samples: Annotated[int, Field(ge=10, le=10_000_000)] = Field(
        default=4000, description="Samples over all splits; `test_fraction` of them are the test split."
    )
    features: Annotated[int, Field(ge=1, le=100_000)] = Field(default=32, description="Values per sample.")
    classes: Annotated[int, Field(ge=2, le=1000)] = Field(default=10, description="Classes, equally likely.")
    separation: Annotated[float, UnsignedZero] = Field(
        default=3.0,
        ge=0,
        le=1000,
        description="Distance of each class's mean from the origin, in standard deviations of its noise.",
    )
    spread: Annotated[float, UnsignedZero] = Field(
        default=0.0,
        ge=0,
        le=5,
        description="Each sample is multiplied by exp(spread · t), t standard normal: 0 leaves lengths as they are.",
    )


class DataSpec(Strict):
    """The data set and how it is split."""

    added = frozenset({"synthetic"})

    dataset: Literal[
        "digits", "cifar10", "parquet", "mnist", "fashion_mnist", "cifar100", "npz", "images", "synthetic"
    ] = Field(
        description="`digits` ships with scikit-learn and `synthetic` is drawn from its parameters: both need no "
        "network; `mnist`, `fashion_mnist`, `cifar10`, `cifar100` are fetched by torchvision once per node; "
        "`parquet` (Hugging Face-style image files), `npz` (NumPy arrays) and `images` (a folder per class) are "
        "read under a data root."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Inside an allowed data root. `parquet`: a folder with `train*.parquet` and `test*.parquet`; "
        "`npz`: a file with `x_train`, `y_train`, `x_test`, `y_test`; `images`: a folder with `train/<class>/` and "
        "`test/<class>/`. Required for these, meaningless elsewhere.",
    )
    synthetic: SyntheticSpec | None = Field(
        default=None, description="What `synthetic` draws; its defaults when left out. Meaningless elsewhere."
    )
    train_samples: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Keep this many training samples (drawn by `split_seed`, before the validation "
        "split is taken); all of them when left out.",
    )
    validation_fraction: float = Field(
        default=0.15, gt=0, le=0.5, description="Share of the training samples held out for validation."
    )
    test_fraction: float = Field(
        default=0.2,
        gt=0,
        le=0.5,
        description="Share of all samples held out for the test; used only where the data set has no "
        "test split of its own (`digits`, `synthetic`).",
    )
    split_seed: Seed = Field(default=0, description="Seed of the splits, the same for all trials.")
