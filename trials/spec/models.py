"""What a user may ask for: the typed, strict, versioned study document.

Every model forbids unknown keys and refuses to coerce (text is not a number, 32.0 is
not a batch size). `parse_spec` is the one way in: it turns every complaint into an
`Issue` with a JSON pointer, so that REST, the command line and the driver say the same.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from trials.spec.base import (
    MODEL_AXES,
    TRAINING_AXES,
    Activation,
    BatchSize,
    Channels,
    Depth,
    KernelSide,
    LearningRate,
    ModelKind,
    Normaliser,
    Optimiser,
    Placement,
    Pooling,
    Seed,
    Strict,
    Stride,
    UnsignedZero,
    WeightDecay,
    Width,
)
from trials.spec.checks import cross_checks, warnings_of
from trials.spec.data import DataSpec, SyntheticSpec
from trials.spec.hypotheses import BatchSizeSlope, Geometry, Hypothesis, Ranking, WidthPeak
from trials.spec.issues import Issue, SpecError, issues_from

__all__ = [
    "MODEL_AXES",
    "TRAINING_AXES",
    "Activation",
    "BatchSizeSlope",
    "BudgetSpec",
    "DataSpec",
    "Geometry",
    "Hypothesis",
    "ModelKind",
    "ModelSpec",
    "Normaliser",
    "Optimiser",
    "PaperRow",
    "Placement",
    "Pooling",
    "ProbesSpec",
    "Ranking",
    "ResourcesSpec",
    "ScheduleSpec",
    "SpaceSpec",
    "StudySpec",
    "SyntheticSpec",
    "TrainingSpec",
    "WidthPeak",
    "parse_spec",
    "warnings_of",
]


class ModelSpec(Strict):
    """The network. Each key but `kind`, `heads` and `patch` may be an axis in `space` instead."""

    added = frozenset({"placement", "gain", "channels", "kernel", "stride", "pooling", "heads", "patch"})

    kind: ModelKind = Field(
        default="mlp",
        description="`mlp`: fully connected; `residual_mlp`: blocks x + activation(affine(x)) at one width; `cnn`: "
        "convolutions, then one affine map; `attention`: patches as tokens through self-attention blocks.",
    )
    depth: Depth = Field(
        default=1, description="Hidden layers (`mlp`; 0 is a linear model) or blocks; a `cnn`'s are its `channels`."
    )
    width: Width = Field(default=32, description="Units per hidden layer, or features per token.")
    activation: Activation = Field(default="tanh", description="Activation after each hidden layer.")
    placement: Placement = Field(
        default="pre",
        description="`pre`: the normaliser acts on an affine map's input, as the paper derives; `post`: on its "
        "output, before the activation (batch, layer, RMS, group and instance norm, and norm_like).",
    )
    gain: bool = Field(
        default=False,
        description="Whether normalisers learn a scale (batch and layer norm, group and instance norm: and a shift).",
    )
    channels: Channels | None = Field(
        default=None, description="`cnn` only, and required there: output channels of each convolution."
    )
    kernel: KernelSide = Field(default=3, description="`cnn` only: side of every kernel; padded by half of it.")
    stride: Stride = Field(default=1, description="`cnn` only: stride of every convolution.")
    pooling: Pooling = Field(default="max", description="`cnn` only: 2 × 2 pooling after each activation.")
    heads: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="`attention` only: heads; `width` must be a multiple."
    )
    patch: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4,
        description="`attention` only: side of the square image patches that become tokens; of a vector, "
        "the values per token.",
    )


class BudgetSpec(Strict):
    """How long every trial trains: exactly one of these."""

    added = frozenset({"updates", "samples"})

    epochs: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="Passes over the training split."
    )
    updates: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None, description="Optimiser steps, the same for every batch size."
    )
    samples: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = Field(
        default=None, description="Training samples seen: samples // batch_size steps."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [name for name in ("epochs", "updates", "samples") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of epochs, updates, samples")
        return self


class ScheduleSpec(Strict):
    """How the learning rate changes over a trial's updates."""

    kind: Literal["constant", "cosine", "step"] = Field(
        default="constant",
        description="`cosine`: from the learning rate to `final` of it over the whole budget; `step`: times `factor` "
        "after each share `every` of the budget.",
    )
    final: Annotated[float, UnsignedZero] = Field(
        default=0.0, ge=0, le=1, description="`cosine` only: share of the learning rate at the end."
    )
    every: float = Field(default=0.3, ge=1e-4, lt=1, description="`step` only: share of the budget between steps.")
    factor: float = Field(default=0.1, gt=0, le=1, description="`step` only: what the learning rate is multiplied by.")


class TrainingSpec(Strict):
    """The optimiser and its budget."""

    added = frozenset({"momentum", "weight_decay", "schedule", "scaling", "scaling_batch_size"})

    optimiser: Optimiser = Field(
        default="sgd",
        description="`sgd`: plain stochastic gradient descent; `momentum`: with heavy-ball momentum; `adam`, `adamw`: "
        "β = 0.9, 0.999, ε = 1e-8.",
    )
    momentum: Annotated[float, UnsignedZero] = Field(
        default=0.9, ge=0, lt=1, description="`momentum` only: share of the velocity kept."
    )
    weight_decay: WeightDecay = Field(
        default=0.0, description="λ: added to the gradient as λ·w; for `adamw`, w is multiplied by 1 − η·λ instead."
    )
    schedule: ScheduleSpec = Field(default=ScheduleSpec(), description="Of the learning rate.")
    scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="The learning rate at batch size B is the one listed times B / scaling_batch_size (`linear`), or "
        "its square root (`sqrt`).",
    )
    scaling_batch_size: BatchSize = Field(
        default=32, description="Batch size at which the learning rates are the ones listed."
    )
    budget: BudgetSpec = Field(description="How long each trial trains.")
    last_batch: Literal["drop"] = Field(
        default="drop",
        description="A last batch smaller than `batch_size` is dropped, for every normaliser alike.",
    )


class SpaceSpec(Strict):
    """The axes of the design; every combination of levels is a cell."""

    added = frozenset({"placement", "gain", "channels", "kernel", "stride", "pooling", "optimiser", "weight_decay"})

    normaliser: list[Normaliser] = Field(
        min_length=1,
        max_length=100,
        description="The arms of the study. `none`, `batch_norm`, `layer_norm` and `rms_norm` fit every kind of "
        "model; `group_norm`, `instance_norm`, `patch_norm` and `patch_norm_affine` a `cnn` only; the others every "
        "kind but a `cnn`.",
    )
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
    placement: list[Placement] | None = Field(
        default=None, min_length=1, max_length=2, description="Instead of model.placement."
    )
    gain: list[bool] | None = Field(default=None, min_length=1, max_length=2, description="Instead of model.gain.")
    channels: list[Channels] | None = Field(
        default=None, min_length=1, max_length=100, description="Instead of model.channels: a list of lists."
    )
    kernel: list[KernelSide] | None = Field(
        default=None, min_length=1, max_length=31, description="Instead of model.kernel."
    )
    stride: list[Stride] | None = Field(
        default=None, min_length=1, max_length=16, description="Instead of model.stride."
    )
    pooling: list[Pooling] | None = Field(
        default=None, min_length=1, max_length=3, description="Instead of model.pooling."
    )
    optimiser: list[Optimiser] | None = Field(
        default=None, min_length=1, max_length=4, description="Instead of training.optimiser."
    )
    weight_decay: list[WeightDecay] | None = Field(
        default=None, min_length=1, max_length=1000, description="Instead of training.weight_decay."
    )

    @field_validator("*")
    @classmethod
    def _levels_differ(cls, levels: list[Any] | None) -> list[Any] | None:
        for index, level in enumerate(levels or []):
            if level in (levels or [])[:index]:
                raise ValueError(f"level {level!r} is listed twice; list each level once")
        return levels


class PaperRow(Strict):
    """Where in "The Affine Divergence" a study's claim stands."""

    row: str = Field(min_length=1, max_length=200, description="Figure or section.")
    outcome: str = Field(min_length=1, max_length=1000, description="What the paper reports to have seen.")


class ProbesSpec(Strict):
    """Measurements of the divergence while training, on fixed batches of the training split."""

    every: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=5, description="Epochs between probes; the first is before the first update."
    )
    samples: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Samples per probe, in batches of the trial's batch size; one to 16 of them."
    )


class ResourcesSpec(Strict):
    """What one pack asks of the cluster, and how many packs run at once."""

    cpus_per_pack: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Cores and compute threads of one pack."
    )
    gpus_per_pack: Annotated[float, Field(ge=0, le=64), UnsignedZero] = Field(
        default=0, description="GPUs of one pack; a fraction shares one. Above 0 the pack trains on the GPU."
    )
    packs_in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=10_000)] = Field(
        default="auto", description="`auto`: as many as the cluster has room for."
    )


class StudySpec(Strict):
    """One study: a design, a training recipe, and the hypotheses it is to answer."""

    added = frozenset({"probes", "paper"})

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
    hypotheses: list[Hypothesis] = Field(
        default_factory=list, max_length=20, description="What the study claims; fixed and hashed at submission."
    )
    probes: ProbesSpec | None = Field(default=None, description="Measure the divergence while training; left out: no.")
    paper: PaperRow | None = Field(default=None, description="Shown in the report beside what was seen.")
    resources: ResourcesSpec = Field(default=ResourcesSpec(), description="What one pack asks of the cluster.")

    @field_validator("version", mode="before")
    @classmethod
    def _version_is_whole(cls, version: Any) -> Any:
        """`true` and `1.0` equal 1, which is all that a literal asks for."""
        if isinstance(version, bool | float):
            raise ValueError(f"must be the whole number 1, not {version!r}")
        return version

    def axes(self) -> dict[str, list[Any]]:
        """Every axis but the seed with its levels, from the slowest to the fastest in the plan's order."""
        space, model, training = self.space, self.model, self.training
        axes: dict[str, list[Any]] = {"batch_size": list(space.batch_size)}
        for name in MODEL_AXES:
            axes[name] = list(getattr(space, name) or [getattr(model, name)])
        axes["optimiser"] = list(space.optimiser or [training.optimiser])
        axes["normaliser"] = list(space.normaliser)
        axes["weight_decay"] = list(space.weight_decay or [training.weight_decay])
        axes["learning_rate"] = list(space.learning_rate)
        return axes

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
        content = _content(self, without={"name", "description", "resources", "paper"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _content(value: Any, without: frozenset[str] | set[str] = frozenset()) -> Any:
    """What is hashed of a document: everything but keys added later that are at their default."""
    if isinstance(value, list | tuple):
        return [_content(item) for item in value]
    if not isinstance(value, Strict):
        return value
    fields = type(value).model_fields
    return {
        name: _content(getattr(value, name))
        for name in fields
        if name not in without and not (name in value.added and getattr(value, name) == fields[name].default)
    }


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
    if issues := cross_checks(spec):
        raise SpecError(issues)
    return spec


def _kind(value: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "text"}.get(type(value), f"a {type(value).__name__}")
