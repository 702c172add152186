"""The answer to a `geometry`: what a normaliser makes of a cloud of points, from the probes of the first map.

There is no chance in it beyond the sample that was drawn, so no p-value: the numbers are within the
stated tolerance of the shape, in every trial of the arm, or they are not. The sample is the data's, not
the seed's: trials that differ in their seeds alone repeat one another and are no further evidence.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.result import GeometryResult, HypothesisResult, ShapeArm, ShapeVerdict, StudyVerdict, rounded
from analysis.table import FirstProbe
from analysis.wording import arm_name, counted, listed
from trials.spec.models import Geometry

TOLERANCE = 0.05
"""Share by which a mean length, or a cloud's deviation, may differ and still be equal."""

ONE_LENGTH = 0.10
"""Largest standard deviation, as a share of the radius, of inputs of one length. Layer norm's ε = 1e-5 alone gives
points from two features 0.04, because a few samples have nearly equal features."""

SEVERAL_DIRECTIONS = 1.5
"""Least participation ratio of inputs that lie in more than one direction."""

_WORDS = {
    "cloud": "a cloud as it came",
    "points": "points at one length on a line",
    "circle": "a circle",
    "disc": "a filled disc",
}


def answer_geometry(index: int, claim: Geometry, probes: Mapping[str, Sequence[FirstProbe]]) -> HypothesisResult:
    """Supported where every named arm has the shape, contradicted where one has not, undecided without probes.

    Args:
        probes: per arm, the first probe of the first affine map of each trial.
    """
    arms = tuple(_arm(claim, arm, probes) for arm in claim.arms)
    verdicts = {arm.verdict for arm in arms}
    verdict: StudyVerdict = "supported" if verdicts == {"as claimed"} else "undecided"
    if "otherwise" in verdicts:
        verdict = "contradicted"
    shape = _WORDS[claim.shape] + ("" if claim.radius is None else f" of radius {claim.radius:g}")
    named = listed([arm_name(arm) for arm in claim.arms])
    said = {"supported": "becomes", "contradicted": "does not become", "undecided": "may become"}[verdict]
    details = "; ".join(f"{arm_name(arm.normaliser)}: {arm.reason}" for arm in arms)
    return HypothesisResult(
        index=index,
        kind=claim.kind,
        claim=f"{named} makes {shape}",
        arms=tuple(claim.arms),
        alpha=None,
        verdict=verdict,
        sentence=f"{verdict.capitalize()}: what enters the first affine map {said} {shape} under {named}. "
        f"Found for {details}.",
        geometry=GeometryResult(claim.shape, claim.radius, TOLERANCE, ONE_LENGTH, arms),
    )


def _arm(claim: Geometry, arm: str, probes: Mapping[str, Sequence[FirstProbe]]) -> ShapeArm:
    found = probes.get(arm, ())
    if not found:
        return ShapeArm(arm, None, None, None, 0, "unknown", "no trial has a probe before its first update")
    mean, sd, directions = (float(np.mean(column)) for column in zip(*found, strict=True))
    plain = probes.get("none", ()) if claim.shape == "cloud" else ()
    reference = FirstProbe(*(float(np.mean(column)) for column in zip(*plain, strict=True))) if plain else None
    failed = sum(not is_shape(claim, probe, reference) for probe in found)
    verdict: ShapeVerdict = "otherwise" if failed else "as claimed"
    reason = f"lengths {mean:.3f} ± {sd:.3f} (mean and standard deviation), {directions:.2f} directions"
    if reference is not None and arm != "none":
        reason += f", where “none” has {reference.norm_mean:.3f} ± {reference.norm_sd:.3f}"
    trials = counted(len(found), "trial")
    reason += f"; not so in {failed} of {trials}" if 0 < failed < len(found) else f"; in {trials}"
    return ShapeArm(arm, rounded(mean), rounded(sd), rounded(directions), len(found), verdict, reason)


def is_shape(claim: Geometry, probe: FirstProbe, reference: FirstProbe | None) -> bool:
    """Whether one trial's normalised inputs have the claimed shape, within the tolerances above.

    Args:
        reference: of a cloud, what the arm without a normaliser has, where the study has that arm.
    """
    mean, sd, directions = probe
    several = directions > SEVERAL_DIRECTIONS
    if claim.shape == "cloud":
        if reference is None:
            return several and sd > ONE_LENGTH * mean
        return several and _near(mean, reference.norm_mean) and _near(sd, reference.norm_sd)
    radius = claim.radius or 1.0
    if claim.shape == "disc":
        return several and mean < radius and sd > ONE_LENGTH * radius
    one_length = _near(mean, radius) and sd <= ONE_LENGTH * radius
    return one_length and (directions <= 1 + TOLERANCE if claim.shape == "points" else several)


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= TOLERANCE * abs(wanted)
