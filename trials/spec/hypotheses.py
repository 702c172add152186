"""The part of the study document that says what is claimed."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from trials.spec.base import Normaliser, Strict


def _listed_once(arms: list[str]) -> list[str]:
    if len(set(arms)) != len(arms):
        raise ValueError("an arm is listed twice; list each arm once")
    return arms


Arms = Annotated[list[Normaliser], Field(min_length=1), AfterValidator(_listed_once)]


class BatchSizeSlope(Strict):
    """The claim that accuracy changes with batch size, in one direction, for the named arms."""

    kind: Literal["batch_size_slope"] = Field(
        default="batch_size_slope", description="The slope of test accuracy per doubling of batch size."
    )
    arms: Arms = Field(description="Normalisers the claim is about.")
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


class Ranking(Strict):
    """The claim that some arms are more accurate than others."""

    kind: Literal["ranking"] = Field(description="An order of the arms by test accuracy.")
    tiers: list[Annotated[list[Normaliser], Field(min_length=1)]] = Field(
        min_length=2,
        description="Best first: every arm of a tier is claimed to be more accurate than every arm of the tiers "
        "after it; within a tier nothing is claimed.",
    )
    smallest_difference: float = Field(
        default=0.005, gt=0, lt=1, description="Smallest difference of interest, in accuracy (0.005 is half a point)."
    )
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="Error rate, family-wise over the pairs compared.")

    @field_validator("tiers")
    @classmethod
    def _arms_differ(cls, tiers: list[list[str]]) -> list[list[str]]:
        listed: list[str] = []
        for arm in (arm for tier in tiers for arm in tier):
            if arm in listed:
                raise ValueError(f"{arm!r} is listed twice; an arm has one place in the order")
            listed.append(arm)
        return tiers


class WidthPeak(Strict):
    """The claim that accuracy rises with width to a level inside the range, and falls after it."""

    kind: Literal["width_peak"] = Field(description="A maximum of test accuracy over width, inside the range.")
    arms: Arms = Field(description="Normalisers the claim is about.")
    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="Error rate, family-wise over all arms.")


class Geometry(Strict):
    """The claim about what a normaliser makes of a cloud of points in the plane, from the probes of the first map."""

    kind: Literal["geometry"] = Field(description="The shape that normalised inputs have.")
    arms: Arms = Field(description="Normalisers the claim is about.")
    shape: Literal["cloud", "points", "circle", "disc"] = Field(
        description="`cloud`: as it came; `points`: on a line, at one length; `circle`: at one length in all "
        "directions; `disc`: at lengths below `radius`, not all the same."
    )
    radius: float | None = Field(default=None, gt=0, description="Of the points, circle or disc.")


def _kind_of(hypothesis: Any) -> str:
    kind = (
        hypothesis.get("kind", _DEFAULT) if isinstance(hypothesis, Mapping) else getattr(hypothesis, "kind", _DEFAULT)
    )
    return kind if isinstance(kind, str) else repr(kind)


_DEFAULT = "batch_size_slope"

Hypothesis = Annotated[
    Annotated[BatchSizeSlope, Tag("batch_size_slope")]
    | Annotated[Ranking, Tag("ranking")]
    | Annotated[WidthPeak, Tag("width_peak")]
    | Annotated[Geometry, Tag("geometry")],
    Discriminator(_kind_of),
]
