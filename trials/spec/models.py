"""What a user may ask for: the typed, strict, versioned study document.

Every model forbids unknown keys and refuses to coerce (text is not a number, 32.0 is
not a batch size). `parse_spec` is the one way in: it turns every complaint into an
`Issue` with a JSON pointer, so that REST, the command line and the driver say the same.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trials.spec.issues import Issue, SpecError, issues_from

Normaliser = Literal["none", "batch_norm", "layer_norm", "rms_norm", "norm_like", "affine_like"]
Activation = Literal["tanh", "relu", "leaky_relu", "gelu", "identity"]

BatchSize = Annotated[int, Field(ge=1, le=1_000_000)]
LearningRate = Annotated[float, Field(gt=0, le=1e9)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Depth = Annotated[int, Field(ge=0, le=64)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSpec(_Strict):
    """The data set and how it is split."""

    dataset: Literal["digits", "cifar10", "parquet"] = Field(
        description="`digits` ships with scikit-learn and needs no network; `cifar10` is fetched by "
        "torchvision once per node; `parquet` reads Hugging Face-style image files under a data root."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Folder with `train*.parquet` and `test*.parquet`, inside an allowed data root. "
        "Required for `parquet`, meaningless elsewhere.",
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
        "test split of its own (`digits`).",
    )
    split_seed: Seed = Field(default=0, description="Seed of the splits, the same for all trials.")


class ModelSpec(_Strict):
    """The network. Each of `depth`, `width`, `activation` may be an axis in `space` instead."""

    kind: Literal["mlp"] = Field(default="mlp", description="Fully connected network.")
    depth: Depth = Field(default=1, description="Number of hidden layers; 0 is a linear model.")
    width: Width = Field(default=32, description="Units per hidden layer.")
    activation: Activation = Field(default="tanh", description="Activation after each hidden layer.")


class BudgetSpec(_Strict):
    """How long every trial trains."""

    epochs: Annotated[int, Field(ge=1, le=100_000)] = Field(description="Passes over the training split.")


class TrainingSpec(_Strict):
    """The optimiser and its budget."""

    optimiser: Literal["sgd"] = Field(default="sgd", description="Plain stochastic gradient descent.")
    budget: BudgetSpec = Field(description="How long each trial trains.")
    last_batch: Literal["drop"] = Field(
        default="drop",
        description="A last batch smaller than `batch_size` is dropped, for every normaliser alike.",
    )


class SpaceSpec(_Strict):
    """The axes of the design; every combination of levels is a cell."""

    normaliser: list[Normaliser] = Field(min_length=1, max_length=100, description="The arms of the study.")
    batch_size: list[BatchSize] = Field(
        min_length=1, max_length=1000, description="Samples per optimiser step; at most the training split."
    )
    learning_rate: list[LearningRate] = Field(min_length=1, max_length=1000, description="Step sizes of the optimiser.")
    width: list[Width] | None = Field(
        default=None, min_length=1, max_length=1000, description="Instead of model.width."
    )
    depth: list[Depth] | None = Field(default=None, min_length=1, max_length=100, description="Instead of model.depth.")
    activation: list[Activation] | None = Field(
        default=None, min_length=1, max_length=100, description="Instead of model.activation."
    )

    @field_validator("*")
    @classmethod
    def _levels_differ(cls, levels: list[Any] | None) -> list[Any] | None:
        seen: set[Any] = set()
        for level in levels or []:
            if level in seen:
                raise ValueError(f"level {level!r} is listed twice; list each level once")
            seen.add(level)
        return levels


class BatchSizeSlope(_Strict):
    """The claim that accuracy changes with batch size, in one direction, for the named arms."""

    kind: Literal["batch_size_slope"] = Field(
        default="batch_size_slope", description="The slope of test accuracy per doubling of batch size."
    )
    arms: list[Normaliser] = Field(min_length=1, description="Normalisers the claim is about.")
    direction: Literal["negative", "positive", "flat"] = Field(
        description="Claimed sign of the change in test accuracy per doubling of batch size."
    )
    smallest_slope: float = Field(
        default=0.002,
        gt=0,
        lt=1,
        description="Smallest slope of interest, in accuracy per doubling (0.002 is 0.2 points): an arm "
        "whose whole interval lies within ± this value is `flat`.",
    )
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="Error rate, family-wise over all arms.")

    @field_validator("arms")
    @classmethod
    def _arms_differ(cls, arms: list[str]) -> list[str]:
        if len(set(arms)) != len(arms):
            raise ValueError("an arm is listed twice; list each arm once")
        return arms


class ResourcesSpec(_Strict):
    """What one pack asks of the cluster, and how many packs run at once."""

    cpus_per_pack: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Cores and compute threads of one pack."
    )
    gpus_per_pack: Annotated[float, Field(ge=0, le=64)] = Field(
        default=0, description="GPUs of one pack; a fraction shares one. Above 0 the pack trains on the GPU."
    )
    packs_in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=10_000)] = Field(
        default="auto", description="`auto`: as many as the cluster has room for."
    )


class StudySpec(_Strict):
    """One study: a design, a training recipe, and the hypotheses it is to answer."""

    version: Literal[1] = Field(description="Version of this document's form.")
    name: str = Field(
        min_length=1,
        max_length=100,
        pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9 ._-]*[A-Za-z0-9])?$",
        description="Letters, digits, space, `.`, `_`, `-`; starts and ends with a letter or digit.",
    )
    description: str | None = Field(default=None, max_length=2000, description="Free text, shown in the report.")
    data: DataSpec = Field(description="The data set.")
    model: ModelSpec = Field(default=ModelSpec(), description="The network.")
    training: TrainingSpec = Field(description="Optimiser and budget.")
    space: SpaceSpec = Field(description="The axes and their levels.")
    seeds: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[Seed], Field(min_length=1, max_length=10_000)] = (
        Field(description="A count n (seeds 0 … n−1) or a list. Shared over all cells, so arms are paired by seed.")
    )
    design: Literal["fixed_lr"] = Field(
        default="fixed_lr",
        description="`fixed_lr`: the effect of batch size is estimated within each learning rate, then combined.",
    )
    hypotheses: list[BatchSizeSlope] = Field(
        default_factory=list, max_length=20, description="What the study claims; fixed and hashed at submission."
    )
    resources: ResourcesSpec = Field(default=ResourcesSpec(), description="What one pack asks of the cluster.")

    @property
    def seed_list(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else list(self.seeds)

    def canonical_json(self) -> str:
        """The document as canonical JSON: defaults filled in, keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def content_hash(self) -> str:
        """SHA-256 (hex) of everything that can change a result or a verdict.

        Name, description and resources are left out: two studies with one hash train the
        same trials and ask the same questions of them.
        """
        content = self.model_dump(mode="json", exclude={"name", "description", "resources"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def parse_spec(document: Any) -> StudySpec:
    """Validate a document (as decoded from JSON or YAML) into a `StudySpec`.

    Raises:
        SpecError: with one `Issue` per fault, each with a JSON pointer to its place.
    """
    if not isinstance(document, Mapping):
        raise SpecError([Issue("", f"a study is a mapping of keys to values, not {_kind(document)}")])
    try:
        spec = StudySpec.model_validate(dict(document))
    except ValidationError as error:
        raise SpecError(issues_from(error, StudySpec)) from None
    if issues := _cross_checks(spec):
        raise SpecError(issues)
    return spec


def warnings_of(spec: StudySpec) -> list[Issue]:
    """What is allowed and will probably disappoint; told at submission, refused by nothing."""
    found: list[Issue] = []
    if spec.hypotheses and len(spec.seed_list) < 2:
        found.append(
            Issue("/seeds", "with one seed no interval and no verdict can be computed; use at least 3, better 5")
        )
    if "batch_norm" in spec.space.normaliser and 1 in spec.space.batch_size:
        place = f"/space/batch_size/{spec.space.batch_size.index(1)}"
        found.append(Issue(place, "batch_norm over a batch of one sample turns every input into zero"))
    return found


def _cross_checks(spec: StudySpec) -> list[Issue]:
    """Faults that take more than one field to see."""
    issues: list[Issue] = []
    if spec.data.dataset == "parquet" and spec.data.path is None:
        issues.append(Issue("/data/path", "required for data set 'parquet': the folder that holds its files"))
    if spec.data.dataset != "parquet" and spec.data.path is not None:
        issues.append(Issue("/data/path", f"has no meaning for data set {spec.data.dataset!r}; remove it"))
    for axis in ("width", "depth", "activation"):
        if getattr(spec.space, axis) is not None and axis in spec.model.model_fields_set:
            issues.append(Issue(f"/model/{axis}", f"is also an axis in /space/{axis}; say it in one place"))
    if isinstance(spec.seeds, list) and len(set(spec.seeds)) != len(spec.seeds):
        issues.append(Issue("/seeds", "a seed is listed twice; list each seed once"))
    for index, hypothesis in enumerate(spec.hypotheses):
        for position, arm in enumerate(hypothesis.arms):
            if arm not in spec.space.normaliser:
                have = ", ".join(spec.space.normaliser)
                issues.append(
                    Issue(
                        f"/hypotheses/{index}/arms/{position}", f"{arm!r} is not among the study's normalisers ({have})"
                    )
                )
        if len(spec.space.batch_size) < 2:
            issues.append(Issue(f"/hypotheses/{index}", "a batch-size slope needs at least two levels of batch_size"))
    if not math.isfinite(spec.resources.gpus_per_pack):
        issues.append(Issue("/resources/gpus_per_pack", "must be finite"))
    return issues


def _kind(value: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "text"}.get(type(value), f"a {type(value).__name__}")
