"""From estimates to verdicts: Holm, the verdict of an arm, the answer to a hypothesis."""

from collections.abc import Sequence
from dataclasses import replace

from analysis.result import (
    ArmJudgement,
    ArmVerdict,
    HypothesisResult,
    Interval,
    PaperResult,
    RateDirection,
    RateSlope,
    Seen,
    StudyVerdict,
)
from analysis.wording import (
    CLAIMS,
    arm_name,
    band,
    counted,
    level,
    listed,
    points_interval,
    probability,
    rates_text,
    slope_text,
)
from trials.spec.models import BatchSizeSlope, PaperRow


def judge_arm(
    interval: Interval | None,
    p_holm: float | None,
    p_seeds_holm: float | None,
    smallest_p: float | None,
    smallest_slope: float,
    alpha: float,
    failure: str | None,
) -> tuple[ArmVerdict, str]:
    """The verdict of one arm and its reason in words.

    Args:
        p_holm: of the permutation test.
        p_seeds_holm: of the test over seeds; keeps the error rate family-wise also where seeds have
            slopes of their own, which neither the permutation test nor one arm's interval does.
        failure: why the interval or p-value could not be computed, if so.
    """
    if interval is None or p_holm is None or p_seeds_holm is None:
        return "undecided", f"not computable: {failure}"
    low, high = interval
    shown, flat = f"the {level(alpha)} interval ({points_interval(interval)})", band(smallest_slope)
    if -smallest_slope <= low and high <= smallest_slope:
        return "flat", f"{shown} lies within {flat} points per doubling"
    side = "negative" if high < 0 else "positive" if low > 0 else None
    if side is None:
        return "undecided", f"{shown} contains zero and reaches beyond {flat} points per doubling"
    if p_holm <= alpha and p_seeds_holm <= alpha:
        return side, f"{shown} excludes zero and the Holm-adjusted p-value is {probability(p_holm)}"
    if p_holm <= alpha:
        return "undecided", (
            f"{shown} excludes zero, but seeds differ too much for the number of arms: the Holm-adjusted p-value over "
            f"seeds, {probability(p_seeds_holm)}, is above {alpha:g}"
        )
    reason = f"{shown} excludes zero, but the Holm-adjusted p-value {probability(p_holm)} is above {alpha:g}"
    if smallest_p is not None and smallest_p > alpha:
        reason += (
            f"; with so few batch sizes and seeds no p-value below {probability(smallest_p)} is possible, so this "
            "design cannot decide: add seeds or batch sizes"
        )
    return "undecided", reason


def rate_direction(interval: Interval | None, smallest_slope: float) -> RateDirection:
    """What one learning rate's interval says by itself; see `RateSlope`."""
    if interval is None:
        return "unclear"
    low, high = interval
    if -smallest_slope <= low and high <= smallest_slope:
        return "flat"
    return "falls" if high < 0 else "rises" if low > 0 else "unclear"


def judgement(
    normaliser: str,
    slope: float | None,
    interval: Interval | None,
    p_values: tuple[float | None, float | None],
    verdict: tuple[ArmVerdict, str],
    rates: Sequence[RateSlope],
) -> ArmJudgement:
    """An arm's verdict together with where it comes from: the learning rates at which it falls and rises.

    The verdict stays that of the combined slope, which is the design's estimator; where accuracy falls at
    one learning rate and rises at another, the reason says so.

    Args:
        p_values: Holm-adjusted, of the permutation test and of the test over seeds.
        verdict: what `judge_arm` returned.
    """
    falls_at = tuple(rate.learning_rate for rate in rates if rate.direction == "falls")
    rises_at = tuple(rate.learning_rate for rate in rates if rate.direction == "rises")
    word, reason = verdict
    if falls_at and rises_at:
        differs = (
            "the direction differs between learning rates" if word == "undecided" else "not at every learning rate"
        )
        reason += f"; {differs}: accuracy {rates_text(falls_at, rises_at)}"
    return ArmJudgement(normaliser, slope, interval, *p_values, word, reason, falls_at, rises_at)


def judge_hypothesis(index: int, hypothesis: BatchSizeSlope, judgements: Sequence[ArmJudgement]) -> HypothesisResult:
    """Supported where every named arm has the claimed direction, contradicted where some named arm is
    decided otherwise, undecided in all other cases. `judgements` are of the named arms, in order.

    A mixed arm (accuracy falls at one learning rate and rises at another) counts as undecided: a claim about
    fixed learning rates is not settled by a mean over rates that disagree. This only ever withholds an
    answer, so it cannot raise the error rate.
    """
    claimed = hypothesis.direction
    settled = [j for j in judgements if j.verdict != "undecided" and not j.mixed]
    verdict: StudyVerdict = "supported" if len(settled) == len(judgements) else "undecided"
    if any(j.verdict != claimed for j in settled):
        verdict = "contradicted"
    return HypothesisResult(
        index=index,
        kind=hypothesis.kind,
        claim=f"{claimed} slope for {listed(hypothesis.arms)}",
        arms=tuple(hypothesis.arms),
        alpha=hypothesis.alpha,
        verdict=verdict,
        sentence=_sentence(hypothesis, verdict, judgements) + _differences(judgements),
        direction=claimed,
        smallest_slope=hypothesis.smallest_slope,
        mixed_over_learning_rates=any(j.mixed for j in judgements),
        judgements=tuple(judgements),
    )


def seen(paper: PaperRow, hypotheses: Sequence[HypothesisResult]) -> PaperResult:
    """Seen where every hypothesis is supported, not seen where one is contradicted, undecided otherwise.

    No word of the outcome is read: what no hypothesis tests is not said to be seen.
    """
    verdicts = [h.verdict for h in hypotheses]
    word: Seen = "seen" if verdicts and set(verdicts) == {"supported"} else "undecided"
    if "contradicted" in verdicts:
        word = "not seen"
    sentence = f"As far as the hypotheses test it: {word}." if verdicts else "No hypothesis tests it: undecided."
    return PaperResult(paper.row, paper.outcome, word, sentence)


def with_diverged_excluded(main: HypothesisResult, other: HypothesisResult, diverged: int) -> HypothesisResult:
    """The main answer, and whether it stands without the study's `diverged` trials."""
    sensitive = other.verdict != main.verdict
    sentence = main.sentence
    if sensitive:
        trials = counted(diverged, "diverged trial")
        sentence += (
            f" This depends on diverged trials: with the {trials} of this study excluded instead of counted at chance "
            f"accuracy, the answer would be {other.verdict}."
        )
    return replace(main, sentence=sentence, verdict_excluding_diverged=other.verdict, sensitive_to_diverged=sensitive)


def _sentence(hypothesis: BatchSizeSlope, verdict: StudyVerdict, judgements: Sequence[ArmJudgement]) -> str:
    def of(some: Sequence[ArmJudgement], said: bool = False) -> str:
        return listed([_arm_text(j, hypothesis.alpha, said) for j in some])

    claim = f"test accuracy {CLAIMS[hypothesis.direction]}"
    if hypothesis.direction == "flat":
        claim += f" by more than {band(hypothesis.smallest_slope)[1:]} points per doubling"
    unsettled = [j for j in judgements if j.verdict == "undecided" or j.mixed]
    agree = [j for j in judgements if j not in unsettled and j.verdict == hypothesis.direction]
    against = [j for j in judgements if j not in unsettled and j.verdict != hypothesis.direction]
    if verdict == "supported":
        return f"Supported: {claim} for {of(agree)}."
    if verdict == "contradicted":
        text = f"Contradicted: the claim that {claim} does not hold for {of(against, said=True)}"
        text += f"; it holds for {of(agree)}" if agree else ""
        text += f"; {listed([arm_name(j.normaliser) for j in unsettled])} cannot be decided" if unsettled else ""
        return text + "."
    text = f"Undecided: that {claim} is not settled for {of(unsettled)}"
    text += f"; it holds for {of(agree)}" if agree else ""
    return text + "."


def _differences(judgements: Sequence[ArmJudgement]) -> str:
    """ " The direction differs between learning rates: for … it falls at … and rises at …."; arms alike together."""
    alike: dict[str, list[str]] = {}
    for j in judgements:
        if j.mixed:
            alike.setdefault(rates_text(j.falls_at, j.rises_at), []).append(arm_name(j.normaliser))
    groups = [f"for {listed(names)} it {rates}" for rates, names in alike.items()]
    return f" The direction differs between learning rates: {'; '.join(groups)}." if groups else ""


def _arm_text(judgement: ArmJudgement, alpha: float, said: bool) -> str:
    numbers = slope_text(judgement.slope, judgement.interval, judgement.p_holm, alpha)
    if judgement.mixed and judgement.verdict != "undecided":
        return f"{arm_name(judgement.normaliser)} (combined slope {judgement.verdict}, {numbers})"
    if judgement.verdict == "undecided" and judgement.interval is None:
        numbers += f"; {judgement.reason}" if judgement.slope is not None else f": {judgement.reason}"
    return f"{arm_name(judgement.normaliser)} ({f'{judgement.verdict}, ' if said else ''}{numbers})"
