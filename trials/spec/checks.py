"""Faults and doubts that take more than one field of a study to see.

A value at its default counts as not given: a study's canonical form states every key, and reads back.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from trials.normalisers import CONVOLUTIONAL, DENSE, FACTS
from trials.spec.base import MODEL_AXES, TRAINING_AXES
from trials.spec.hypotheses import BatchSizeSlope, Geometry, Hypothesis, Ranking, WidthPeak
from trials.spec.issues import Issue

if TYPE_CHECKING:
    from trials.spec.models import StudySpec

_WITH_PATH = {
    "parquet": "the folder that holds its files",
    "npz": "the .npz file",
    "images": "the folder that holds train/ and test/",
}

_ONLY = {
    **dict.fromkeys(("depth", "width"), ("mlp", "residual_mlp", "attention")),
    **dict.fromkeys(("channels", "kernel", "stride", "pooling"), ("cnn",)),
    **dict.fromkeys(("heads", "patch"), ("attention",)),
}
"""Keys of `model` with a meaning for some kinds only."""


def cross_checks(spec: "StudySpec") -> list[Issue]:
    """Faults for which a study is refused."""
    checks = (_data, _axes, _model, _normalisers, _training, _seeds_and_resources, _geometry)
    issues = [issue for check in checks for issue in check(spec)]
    for index, hypothesis in enumerate(spec.hypotheses):
        issues += _hypothesis(spec, hypothesis, f"/hypotheses/{index}")
    return issues


def warnings_of(spec: "StudySpec") -> list[Issue]:
    """What is allowed and will probably disappoint; told at submission, refused by nothing."""
    found: list[Issue] = []
    if len(spec.seed_list) < 2 and any(not isinstance(h, Geometry) for h in spec.hypotheses):
        found.append(
            Issue("/seeds", "with one seed no interval and no verdict can be computed; use at least 3, better 5")
        )
    if "batch_norm" in spec.space.normaliser and 1 in spec.space.batch_size and spec.model.kind in _ONE_ROW_PER_SAMPLE:
        place = f"/space/batch_size/{spec.space.batch_size.index(1)}"
        found.append(Issue(place, "batch_norm over a batch of one sample turns every input into zero"))
    if any(isinstance(h, Geometry) for h in spec.hypotheses):
        found += [
            Issue(
                place,
                "with placement 'post' the first map's weights multiply the raw input, which is what a claim "
                "about geometry then sees of these trials; ask it of a study with placement 'pre' alone",
            )
            for place, placement in _levels(spec, "placement")
            if placement == "post"
        ]
    if without := [arm for arm in spec.space.normaliser if FACTS[arm].gain is None]:
        have = "has" if len(without) == 1 else "have"
        found += [
            Issue(place, f"{' and '.join(without)} {have} no gain: gain: true changes nothing there")
            for place, gain in _levels(spec, "gain")
            if gain
        ]
    return found


_ONE_ROW_PER_SAMPLE = ("mlp", "residual_mlp")


def _data(spec: "StudySpec") -> Iterator[Issue]:
    data = spec.data
    if data.dataset in _WITH_PATH and data.path is None:
        yield Issue("/data/path", f"required for data set {data.dataset!r}: {_WITH_PATH[data.dataset]}")
    if data.dataset not in _WITH_PATH and data.path is not None:
        yield Issue("/data/path", f"has no meaning for data set {data.dataset!r}; remove it")
    if data.dataset != "synthetic" and data.synthetic is not None:
        yield Issue(
            "/data/synthetic",
            f"has no meaning for data set {data.dataset!r}; remove it, or choose data set 'synthetic'",
        )


def _axes(spec: "StudySpec") -> Iterator[Issue]:
    for name, part in (
        *((name, "model") for name in MODEL_AXES),
        *((name, "training") for name in TRAINING_AXES),
    ):
        if getattr(spec.space, name) is not None and _is_given(getattr(spec, part), name):
            yield Issue(f"/{part}/{name}", f"is also an axis in /space/{name}; say it in one place")


def _model(spec: "StudySpec") -> Iterator[Issue]:
    model, space = spec.model, spec.space
    for name, kinds in _ONLY.items():
        if model.kind in kinds:
            continue
        detail = f"has no meaning for model kind {model.kind!r}; remove it"
        if model.kind == "cnn" and name in ("depth", "width"):
            detail = f"has no meaning for model kind 'cnn', whose size is its channels; remove {name}"
        if _is_given(model, name):
            yield Issue(f"/model/{name}", detail)
        if getattr(space, name, None) is not None:
            yield Issue(f"/space/{name}", detail)
    if model.kind == "cnn" and model.channels is None and space.channels is None:
        yield Issue(
            "/model/channels",
            "required for model kind 'cnn': the output channels of each convolution, such as [16, 32]; "
            "or lists of them in space.channels",
        )
    if model.kind == "attention":
        for place, depth in _levels(spec, "depth"):
            if depth < 1:
                yield Issue(place, "an attention model needs at least one block; give a depth of 1 or more")
        for place, width in _levels(spec, "width"):
            if width % model.heads:
                yield Issue(place, f"{width} is not a multiple of the {model.heads} heads; change width or model.heads")


def _normalisers(spec: "StudySpec") -> Iterator[Issue]:
    valid = CONVOLUTIONAL if spec.model.kind == "cnn" else DENSE
    for index, arm in enumerate(spec.space.normaliser):
        if arm not in valid:
            yield Issue(
                f"/space/normaliser/{index}",
                f"{arm!r} does not fit model kind {spec.model.kind!r}; valid there: {', '.join(valid)}",
            )
    if without := [arm for arm in spec.space.normaliser if not FACTS[arm].post]:
        have = "has" if len(without) == 1 else "have"
        for place, placement in _levels(spec, "placement"):
            if placement == "post":
                yield Issue(
                    place,
                    f"{', '.join(without)} {have} no placement 'post'; use 'pre', or leave "
                    f"{'it' if len(without) == 1 else 'them'} out of space.normaliser",
                )


def _training(spec: "StudySpec") -> Iterator[Issue]:
    training, schedule = spec.training, spec.training.schedule
    optimisers = spec.space.optimiser or [training.optimiser]
    if _is_given(training, "momentum") and "momentum" not in optimisers:
        yield Issue(
            "/training/momentum", f"has no meaning for {', '.join(optimisers)}; remove it, or use optimiser 'momentum'"
        )
    for name, kind in (("final", "cosine"), ("every", "step"), ("factor", "step")):
        if _is_given(schedule, name) and schedule.kind != kind:
            yield Issue(
                f"/training/schedule/{name}",
                f"has no meaning for schedule {schedule.kind!r}; remove it, or use schedule {kind!r}",
            )
    if _is_given(training, "scaling_batch_size") and training.scaling == "none":
        yield Issue(
            "/training/scaling_batch_size",
            "has no meaning without scaling; remove it, or set scaling to linear or sqrt",
        )


def _seeds_and_resources(spec: "StudySpec") -> Iterator[Issue]:
    if isinstance(spec.seeds, list) and len(set(spec.seeds)) != len(spec.seeds):
        yield Issue("/seeds", "a seed is listed twice; list each seed once")
    if not math.isfinite(spec.resources.gpus_per_pack):
        yield Issue("/resources/gpus_per_pack", "must be finite")


def _geometry(spec: "StudySpec") -> Iterator[Issue]:
    if not any(isinstance(hypothesis, Geometry) for hypothesis in spec.hypotheses):
        return
    levels = _levels(spec, "placement")
    if all(placement == "post" for _, placement in levels):
        yield Issue(
            levels[0][0],
            "a claim about geometry is about what the first map's weights multiply, which with placement 'post' is "
            "the raw input; use 'pre', or remove the claim",
        )


def _hypothesis(spec: "StudySpec", hypothesis: Hypothesis, place: str) -> Iterator[Issue]:
    for where, arm in _arms(hypothesis):
        if arm not in spec.space.normaliser:
            have = ", ".join(spec.space.normaliser)
            yield Issue(f"{place}/{where}", f"{arm!r} is not among the study's normalisers ({have})")
    if isinstance(hypothesis, BatchSizeSlope) and len(spec.space.batch_size) < 2:
        yield Issue(place, "a batch-size slope needs at least two levels of batch_size")
    if isinstance(hypothesis, WidthPeak) and spec.model.kind == "cnn":
        yield Issue(place, "a peak over width is not for model kind 'cnn', whose size is its channels; remove it")
    elif isinstance(hypothesis, WidthPeak) and len(spec.space.width or []) < 3:
        yield Issue(place, "a peak over width needs at least three levels of width; list them in space.width")
    if isinstance(hypothesis, Geometry):
        if spec.probes is None:
            yield Issue(place, "a claim about geometry is judged by probes; add `probes: {}` to the study")
        if hypothesis.shape == "cloud" and hypothesis.radius is not None:
            yield Issue(f"{place}/radius", "has no meaning for shape 'cloud'; remove it")
        if hypothesis.shape != "cloud" and hypothesis.radius is None:
            yield Issue(f"{place}/radius", f"required for shape {hypothesis.shape!r}")


def _arms(hypothesis: Hypothesis) -> Sequence[tuple[str, str]]:
    """Each arm that is named, and where in the hypothesis."""
    if isinstance(hypothesis, Ranking):
        return [
            (f"tiers/{row}/{column}", arm)
            for row, tier in enumerate(hypothesis.tiers)
            for column, arm in enumerate(tier)
        ]
    return [(f"arms/{index}", arm) for index, arm in enumerate(hypothesis.arms)]


def _levels(spec: "StudySpec", name: str) -> list[tuple[str, Any]]:
    """Each level of a key of `model` with its place, whether it is an axis or not."""
    levels = getattr(spec.space, name)
    if levels is None:
        return [(f"/model/{name}", getattr(spec.model, name))]
    return [(f"/space/{name}/{index}", level) for index, level in enumerate(levels)]


def _is_given(part: BaseModel, name: str) -> bool:
    return getattr(part, name) != type(part).model_fields[name].default
