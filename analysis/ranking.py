"""The answer to a `ranking`: every arm of a tier against every arm of the tiers after it."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from analysis.estimators import SMALLEST_SPREAD, Block, balanced
from analysis.holm import holm
from analysis.resampling import bootstrap, stream
from analysis.result import (
    HypothesisResult,
    Interval,
    PairResult,
    PairVerdict,
    RankingResult,
    StudyVerdict,
    TunedArm,
    rounded,
    rounded_interval,
)
from analysis.tuned import Paired, Tuned, both_balanced, paired, within_unit
from analysis.wording import arm_name, band, counted, difference_text, level, listed, points_interval, probability
from trials.spec.models import Ranking

_MOST_NAMED = 4


def answer_ranking(index: int, claim: Ranking, found: Tuned, spec_hash: str, resamples: int) -> HypothesisResult:
    """Supported where every pair is `higher`, contradicted where one is `lower`, undecided otherwise.

    Holm's adjustment is over the pairs of arms in different tiers.
    """
    pairs = [(a, b) for upper, lower in combinations(claim.tiers, 2) for a in upper for b in lower]
    measured = [_measure(found, a, b, claim.alpha, spec_hash, resamples) for a, b in pairs]
    adjusted = holm([m.test.p_two_sided if m.test else None for m in measured])
    results = [
        _pair(*names, m, p, claim) for names, m, p in zip(pairs, measured, (_rounded(p) for p in adjusted), strict=True)
    ]
    verdict: StudyVerdict = "supported" if all(pair.verdict == "higher" for pair in results) else "undecided"
    if any(pair.verdict == "lower" for pair in results):
        verdict = "contradicted"
    arms = tuple(arm for tier in claim.tiers for arm in tier)
    order = " > ".join(", ".join(arm_name(arm) for arm in tier) for tier in claim.tiers)
    return HypothesisResult(
        index=index,
        kind=claim.kind,
        claim=f"accuracy in the order {order}",
        arms=arms,
        alpha=claim.alpha,
        verdict=verdict,
        sentence=_sentence(verdict, results, claim),
        ranking=RankingResult(
            tiers=tuple(tuple(tier) for tier in claim.tiers),
            smallest_difference=claim.smallest_difference,
            arms=tuple(_arm(found, arm, claim.alpha, spec_hash, resamples) for arm in arms),
            pairs=tuple(results),
        ),
    )


class _Measured:
    """One pair before Holm."""

    def __init__(self, block: Block, held_out: Block, alpha: float, spec_hash: str, resamples: int):
        self.n_seeds, self.n_strata = len(block.seeds), int(block.cells.sum())
        self.difference: float | None = None
        self.held_out: float | None = None
        self.interval: Interval | None = None
        self.test: Paired | None = None
        self.failure = "no stratum in which both have an outcome"
        if not self.n_seeds or not self.n_strata:
            return
        columns = [np.nanmean(b.values.reshape(self.n_seeds, -1), axis=1) for b in (block, held_out)]
        self.difference, self.held_out = (rounded(float(column.mean())) for column in columns)
        self.failure = "one seed: an interval and a p-value need at least two"
        if self.n_seeds > 1:
            self.failure = "zero variance: every seed has exactly the same difference"
        if self.n_seeds > 1 and np.ptp(columns[0]) > SMALLEST_SPREAD:
            resampled = bootstrap(np.column_stack(columns), stream(spec_hash, "bootstrap"), resamples)
            self.interval = rounded_interval(resampled.interval(0, alpha))
            self.test = paired(*columns)


def _measure(found: Tuned, better: str, worse: str, alpha: float, spec_hash: str, resamples: int) -> _Measured:
    a, b = found.arms.index(better), found.arms.index(worse)
    test, held_out = ((values[a] - values[b]).T[:, :, None] for values in (found.test, found.held_out))
    return _Measured(*both_balanced(test, held_out), alpha, spec_hash, resamples)


def _pair(better: str, worse: str, m: _Measured, p_holm: float | None, claim: Ranking) -> PairResult:
    verdict, reason = judge_pair(
        m.interval, m.held_out, p_holm, claim.smallest_difference, claim.alpha, m.failure if m.test is None else None
    )
    p_value = _rounded(m.test.p_two_sided if m.test else None)
    return PairResult(
        better,
        worse,
        m.difference,
        m.interval,
        m.held_out,
        p_value,
        p_holm,
        m.n_seeds,
        m.n_strata,
        verdict,
        reason,
    )


def judge_pair(
    interval: Interval | None,
    held_out: float | None,
    p_holm: float | None,
    smallest_difference: float,
    alpha: float,
    failure: str | None,
) -> tuple[PairVerdict, str]:
    """The verdict of one pair and its reason in words.

    Args:
        held_out: the mean difference with each seed at the learning rates that the other seeds chose.
        failure: why there is no p-value, if so.
    """
    if interval is None or held_out is None or p_holm is None:
        return "undecided", f"not computable: {failure}"
    low, high = interval
    shown, equal = f"the {level(alpha)} interval ({points_interval(interval)})", band(smallest_difference)
    if max(-low, high, abs(held_out)) <= smallest_difference:
        return "equal", f"{shown} lies within {equal} points"
    if low <= 0 <= high:
        return "undecided", f"{shown} contains zero and reaches beyond {equal} points"
    if p_holm <= alpha:
        return (
            "higher" if low > 0 else "lower",
            f"{shown} excludes zero and the Holm-adjusted p-value is {probability(p_holm)}",
        )
    return "undecided", f"{shown} excludes zero, but the Holm-adjusted p-value {probability(p_holm)} is above {alpha:g}"


def _arm(found: Tuned, arm: str, alpha: float, spec_hash: str, resamples: int) -> TunedArm:
    block = balanced(found.test[found.arms.index(arm)].T[:, :, None])
    n_seeds, groups = len(block.seeds), block.cells[:, 0]
    if not n_seeds or not groups.any():
        return TunedArm(arm, None, None, 0, 0, ())
    values = np.nanmean(block.values.reshape(n_seeds, -1), axis=1)
    resampled = bootstrap(values[:, None], stream(spec_hash, "bootstrap"), resamples)
    interval = rounded_interval(within_unit(resampled.interval(0, alpha)))
    mean = rounded(float(values.mean()))
    return TunedArm(arm, mean, interval, n_seeds, int(groups.sum()), found.choices(arm, groups))


def _sentence(verdict: StudyVerdict, pairs: Sequence[PairResult], claim: Ranking) -> str:
    by = {word: [p for p in pairs if p.verdict == word] for word in ("higher", "lower", "equal", "undecided")}

    def of(some: Sequence[PairResult]) -> str:
        named = [
            f"{arm_name(p.better)} over {arm_name(p.worse)} "
            f"({difference_text(p.difference, p.interval, p.p_holm, claim.alpha) if p.interval else p.reason})"
            for p in some[:_MOST_NAMED]
        ]
        more = len(some) - len(named)
        return listed(named + ([counted(more, "further pair")] if more else []))

    at_best = "at each arm's best learning rate by validation"
    if verdict == "supported":
        least = min(pairs, key=lambda p: p.difference or 0.0)
        if len(pairs) == 1:
            return f"Supported: test accuracy is higher for {of(pairs)}, {at_best}."
        return (
            f"Supported: test accuracy is in the claimed order for all {len(pairs)} pairs, {at_best}; the smallest "
            f"difference is {of([least])}."
        )
    held = f"{len(by['higher'])} of {len(pairs)} {'pair is' if len(pairs) == 1 else 'pairs are'} in the claimed order"
    text = f"Undecided: {held}, {at_best}"
    if verdict == "contradicted":
        text = f"Contradicted: test accuracy is the other way round for {of(by['lower'])}, {at_best}; {held}"
    if by["equal"]:
        text += f"; equal within {band(claim.smallest_difference)} points: {of(by['equal'])}"
    if by["undecided"]:
        text += f"; not settled: {of(by['undecided'])}"
    return text + "."


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)
