"""The answer to a `width_peak`: does accuracy rise with width to a level inside the range, and fall after it?"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from analysis.estimators import Block, curve_columns
from analysis.holm import holm
from analysis.resampling import bootstrap, stream
from analysis.result import (
    Change,
    HypothesisResult,
    PeakArm,
    PeakVerdict,
    StudyVerdict,
    WidthPeakResult,
    WidthPoint,
    rounded,
    rounded_interval,
)
from analysis.tuned import Paired, Tuned, both_balanced, paired, within_unit
from analysis.wording import arm_name, level, listed, p_text, points, points_interval
from trials.spec.models import WidthPeak

_NONE = Change(None, None, None)


def answer_width_peak(
    index: int, claim: WidthPeak, found: Tuned, widths: Sequence[int], spec_hash: str, resamples: int
) -> HypothesisResult:
    """Supported where every named arm has a peak, contradicted where one has none, undecided otherwise.

    Args:
        widths: all levels of the study.
    """
    curves = [_Curve(found, arm, sorted(widths), claim.alpha, spec_hash, resamples) for arm in claim.arms]
    adjusted = holm([curve.p_value for curve in curves])
    arms = [_judged(curve, p, claim.alpha) for curve, p in zip(curves, adjusted, strict=True)]
    verdict: StudyVerdict = "supported" if all(arm.verdict == "peak" for arm in arms) else "undecided"
    if any(arm.verdict == "no peak" for arm in arms):
        verdict = "contradicted"
    return HypothesisResult(
        index=index,
        kind=claim.kind,
        claim=f"accuracy of {listed([arm_name(a) for a in claim.arms])} peaks inside the range of widths",
        arms=tuple(claim.arms),
        alpha=claim.alpha,
        verdict=verdict,
        sentence=_sentence(verdict, arms),
        width_peak=WidthPeakResult(tuple(arms)),
    )


@dataclass
class _Curve:
    """One arm's mean accuracies per width and the tests at its highest, before Holm."""

    found: Tuned
    arm: str
    widths: list[int]
    alpha: float
    spec_hash: str
    resamples: int
    points: tuple[WidthPoint, ...] = field(init=False)
    peak: int | None = field(init=False, default=None)  # a width
    at_end: bool = field(init=False, default=False)
    rise: Change = field(init=False, default=_NONE)
    fall: Change = field(init=False, default=_NONE)
    clear: bool = field(init=False, default=False)  # every interval the verdict needs excludes zero
    p_value: float | None = field(init=False, default=None)
    failure: str = field(init=False, default="")
    n_seeds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        blocks = self._blocks()
        self.n_seeds = len(blocks[0].seeds)
        everything = np.ones(blocks[0].values.shape[1], dtype=bool)
        (means, counts), (held_out, _) = (curve_columns(block, everything) for block in blocks)
        there = np.flatnonzero(counts > 0) if self.n_seeds else np.array([], dtype=int)
        empty = tuple(WidthPoint(w, None, None, 0, None) for w in self.widths)
        if len(there) < 3:
            self.points, self.failure = empty, "a peak needs at least three widths with outcomes in the same strata"
            return
        values, others = means[:, there], held_out[:, there]
        top = int(np.round(values.mean(axis=0), 12).argmax())
        last = len(there) - 1
        self.peak, self.at_end = self.widths[there[top]], top in (0, last)
        resampled = bootstrap(values, stream(self.spec_hash, "bootstrap"), self.resamples)
        highest = np.bincount(resampled.draws.argmax(axis=1), minlength=len(there)) / len(resampled.draws)
        place = {int(column): i for i, column in enumerate(there)}
        self.points = tuple(
            empty[i]
            if (column := place.get(i)) is None
            else WidthPoint(
                width,
                rounded(float(resampled.means[column])),
                rounded_interval(within_unit(resampled.interval(column, self.alpha))),
                int(counts[i]),
                rounded(float(highest[column])),
            )
            for i, width in enumerate(self.widths)
        )
        less = [k for k in range(len(there)) if k != top]
        changes = {k: self._change(values, others, top, k) for k in less}
        self.rise, self.fall = (changes[k][0] if k != top else _NONE for k in (0, last))
        tests = {k: test for k, (_, test) in changes.items() if test is not None}
        if len(tests) < len(changes):
            self.failure = "one seed" if self.n_seeds < 2 else "zero variance: every seed has exactly the same curve"
            return
        wanted = [k for k in less if 0 < k < last] if self.at_end else [0, last]
        self.clear = all((interval := changes[k][0].interval) is not None and interval[0] > 0 for k in wanted)
        worst = max(tests[k].p_greater for k in wanted)
        # The highest level was picked by looking, so each level inside the range counts as a test. That an end
        # is above all of them needs no such factor: every one of those tests must reject.
        self.p_value = worst if self.at_end else min(1.0, worst * (len(there) - 2))

    def _blocks(self) -> tuple[Block, Block]:
        """`[seed, stratum, width]`; a stratum is every other axis but learning rate and weight decay."""
        arm = self.found.arms.index(self.arm)
        keys = [tuple(v for name, v in group.items() if name != "width") for group in self.found.groups]
        strata = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        shape = (self.found.test.shape[2], max(1, len(strata)), len(self.widths))
        arrays = np.full(shape, np.nan), np.full(shape, np.nan)
        for target, source in zip(arrays, (self.found.test[arm], self.found.held_out[arm]), strict=True):
            for group, (axes, key) in enumerate(zip(self.found.groups, keys, strict=True)):
                if axes["width"] in self.widths:
                    target[:, strata[key], self.widths.index(axes["width"])] = source[group]
        return both_balanced(*arrays)

    def _change(self, values: np.ndarray, others: np.ndarray, top: int, k: int) -> tuple[Change, Paired | None]:
        """How much higher the highest level is than level k."""
        differences = values[:, top] - values[:, k]
        test = paired(differences, others[:, top] - others[:, k])
        resampled = bootstrap(differences[:, None], stream(self.spec_hash, "bootstrap"), self.resamples)
        interval = rounded_interval(resampled.interval(0, self.alpha))
        p_value = None if test is None else rounded(test.p_greater)
        return Change(rounded(float(differences.mean())), interval, p_value), test


def _judged(curve: _Curve, p_holm: float | None, alpha: float) -> PeakArm:
    verdict: PeakVerdict = "undecided"
    p_holm = None if p_holm is None else rounded(p_holm)
    if curve.peak is None or p_holm is None:
        reason = f"not computable: {curve.failure}"
    elif curve.at_end:
        end = "largest" if curve.peak == max(curve.widths) else "smallest"
        decided = curve.clear and p_holm <= alpha
        verdict = "no peak" if decided else "undecided"
        reason = (
            f"the highest is at the {end} width, {curve.peak}, "
            f"{'and' if decided else 'but not'} significantly above every width inside the range "
            f"(Holm-adjusted {p_text(p_holm)})"
        )
    else:
        decided = curve.clear and p_holm <= alpha
        verdict = "peak" if decided else "undecided"
        share = next(point.share_highest for point in curve.points if point.width == curve.peak)
        reason = (
            f"the highest is at width {curve.peak} (in {(share or 0) * 100:.0f}% of resamples): "
            f"{points(curve.rise.difference)} points from the smallest width ({level(alpha)} interval "
            f"{points_interval(curve.rise.interval)}), {points(-(curve.fall.difference or 0.0))} from there to the "
            f"largest (interval {points_interval(_negative(curve.fall.interval))}); "
            f"{'' if decided else 'not significant: '}Holm-adjusted {p_text(p_holm)}"
        )
    return PeakArm(
        normaliser=curve.arm,
        peak=curve.peak,
        rise=curve.rise,
        fall=curve.fall,
        p_holm=p_holm,
        n_seeds=curve.n_seeds,
        verdict=verdict,
        reason=reason,
        curve=curve.points,
    )


def _negative(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (-interval[1], -interval[0])


def _sentence(verdict: StudyVerdict, arms: Sequence[PeakArm]) -> str:
    def of(word: str) -> str:
        return "; for ".join(f"{arm_name(arm.normaliser)} {arm.reason}" for arm in arms if arm.verdict == word)

    said = {
        "supported": "Supported: test accuracy peaks inside the range of widths",
        "contradicted": "Contradicted: test accuracy has no peak inside the range of widths",
        "undecided": "Undecided: that test accuracy peaks inside the range of widths is not settled",
    }[verdict]
    order = {
        "supported": ("peak",),
        "contradicted": ("no peak", "peak", "undecided"),
        "undecided": ("undecided", "peak"),
    }[verdict]
    return f"{said}: for {'; for '.join(text for word in order if (text := of(word)))}."
