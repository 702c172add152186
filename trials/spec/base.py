"""What every part of the study document shares: strictness, and the names and ranges of levels."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Normaliser = Literal[
    "none",
    "batch_norm",
    "layer_norm",
    "rms_norm",
    "norm_like",
    "affine_like",
    "norm_like_half",
    "gradient_only",
    "group_norm",
    "instance_norm",
    "patch_norm",
    "patch_norm_affine",
]
ModelKind = Literal["mlp", "residual_mlp", "cnn", "attention"]
Placement = Literal["pre", "post"]
Pooling = Literal["max", "average", "none"]
Optimiser = Literal["sgd", "momentum", "adam", "adamw"]
Activation = Literal["tanh", "relu", "leaky_relu", "gelu", "identity"]

UnsignedZero = AfterValidator(lambda value: value + 0.0)
"""Reads −0.0 as the 0.0 that it equals, so that both have one canonical form and one hash."""

BatchSize = Annotated[int, Field(ge=1, le=1_000_000)]
LearningRate = Annotated[float, Field(gt=0, le=1e9)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Depth = Annotated[int, Field(ge=0, le=64)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
WeightDecay = Annotated[float, Field(ge=0, le=1e6), UnsignedZero]
Channels = Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1, max_length=32)]
KernelSide = Annotated[int, Field(ge=1, le=31)]
Stride = Annotated[int, Field(ge=1, le=16)]


MODEL_AXES = ("depth", "width", "activation", "placement", "gain", "channels", "kernel", "stride", "pooling")
"""Keys of `model` that may be axes, in the plan's order."""

TRAINING_AXES = ("optimiser", "weight_decay")
"""Keys of `training` that may be axes."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    added: ClassVar[frozenset[str]] = frozenset()
    """Keys that came after the first release of version 1. At their default they are left out of the
    content hash, so that a document written before them keeps its hash."""
