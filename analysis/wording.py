"""Numbers and sentences, the same in `verdict.json` and in the report."""

from collections.abc import Mapping, Sequence

from analysis.result import Interval
from trials.spec import StudySpec

MINUS = "−"

CLAIMS = {
    "negative": "falls as batch size grows",
    "positive": "rises as batch size grows",
    "flat": "does not change with batch size",
}


def arm_name(normaliser: str) -> str:
    """The arm's name within a sentence, where a bare "none" would read as "not any"."""
    return "“none”" if normaliser == "none" else normaliser


def points(value: float | None) -> str:
    """A slope in percentage points, signed: −0.0073 is "−0.73"."""
    if value is None:
        return "–"
    text = f"{value * 100:+.2f}"
    return "0.00" if float(text) == 0 else text.replace("-", MINUS)


def points_interval(interval: Interval | None) -> str:
    return "–" if interval is None else f"{points(interval[0])} to {points(interval[1])}"


def band(smallest_slope: float) -> str:
    """The smallest slope of interest: "±0.20"; as many decimals as it was written with."""
    return f"±{max(f'{smallest_slope * 100:.2f}', f'{smallest_slope * 100:.6g}', key=len)}"


def percent(value: float | None) -> str:
    """An accuracy: 0.9312 is "93.1%"."""
    return "–" if value is None else f"{value * 100:.1f}%"


def probability(value: float | None) -> str:
    """ "0.0006"; what would round to nothing is "<0.0001"."""
    if value is None:
        return "–"
    return "<0.0001" if value < 0.00005 else f"{value:.4f}"


def p_text(value: float) -> str:
    """ "p = 0.0006", "p < 0.0001"."""
    text = probability(value)
    return f"p < {text[1:]}" if text.startswith("<") else f"p = {text}"


def correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", MINUS)


def level(alpha: float) -> str:
    """The level of an interval: alpha 0.05 is "95%"."""
    return f"{round((1 - alpha) * 100, 4):g}%"


def listed(items: Sequence[str], last: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else "none"


def rates_text(falls_at: Sequence[float | None], rises_at: Sequence[float | None]) -> str:
    """ "falls at 0.1 and 0.3 and rises at 1 and 3"; of many learning rates, their number and ends."""

    def some(rates: Sequence[float | None]) -> str:
        known = [rate for rate in rates if rate is not None]
        if len(known) > 6:
            return f"{len(rates)} learning rates between {min(known):g} and {max(known):g}"
        unknown = ["no recorded learning rate"] * (len(rates) - len(known))
        return listed([f"{rate:g}" for rate in known] + unknown)

    return f"falls at {some(falls_at)} and rises at {some(rises_at)}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def slope_text(slope: float | None, interval: Interval | None, p_holm: float | None, alpha: float) -> str:
    """ "−0.73 points per doubling, 95% interval −0.81 to −0.64, p = 0.0006"."""
    if slope is None:
        return "no slope can be computed"
    parts = [f"{points(slope)} points per doubling"]
    if interval is not None:
        parts.append(f"{level(alpha)} interval {points_interval(interval)}")
    if p_holm is not None:
        parts.append(p_text(p_holm))
    return ", ".join(parts)


def difference_text(difference: float | None, interval: Interval | None, p_holm: float | None, alpha: float) -> str:
    """ "+0.73 points, 95% interval 0.64 to 0.81, p = 0.0006"."""
    parts = [f"{points(difference)} points"]
    if interval is not None:
        parts.append(f"{level(alpha)} interval {points_interval(interval)}")
    if p_holm is not None:
        parts.append(p_text(p_holm))
    return ", ".join(parts)


def budget_text(budget: Mapping[str, int]) -> str:
    """ "10 epochs", "20,000 updates", "1,000,000 samples"."""
    ((unit, amount),) = budget.items()
    return f"{amount:,} {unit[:-1] if amount == 1 else unit}"


def budget_caution(budget: Mapping[str, int]) -> str:
    """What else changes with batch size."""
    if "updates" in budget:
        return "At fixed updates a larger batch sees more samples"
    return f"At fixed {next(iter(budget))} a larger batch takes fewer optimiser steps"


_TUNED = (
    "within each stratum (here one level of every axis but learning rate and weight decay) an arm is taken at the "
    "learning rate and weight decay with the best mean validation accuracy over seeds; the test split never chooses."
)
_TOPICS = {
    "ranking": (
        "Rankings",
        f"{_TUNED} Test accuracies of two arms are then subtracted seed by seed and averaged over strata. The "
        "interval is by the same bootstrap over seeds. What is chosen for its validation accuracy has had luck, an arm "
        "that varies more has had more, and its test accuracy shares in it. So the difference is also taken with each "
        "seed at the learning rates that the other seeds chose, and the p-value is Student's t of the smaller of the "
        "two mean differences over the larger of their standard errors, two-sided, Holm over the pairs of arms in "
        "different tiers. A pair is equal where the interval and the second difference lie within ± the smallest "
        "difference of interest; otherwise higher or lower where the interval excludes zero and the adjusted p-value "
        "is at most alpha; otherwise undecided. A ranking is supported where every pair is higher, contradicted where "
        "one is lower, otherwise undecided.",
    ),
    "width_peak": (
        "Peaks over width",
        f"{_TUNED} An arm has a peak where its highest mean is at a width inside the range and is significantly "
        "above both the smallest and the largest width: both intervals exclude zero, and the larger of the two "
        "one-sided p-values (as for rankings), times the number of widths inside the range because the highest was "
        "picked by looking, Holm over the named arms, is at most alpha. It has none where its highest is at an end and "
        "significantly above every width inside. The claim is supported where every named arm has a peak, contradicted "
        "where one has none, otherwise undecided.",
    ),
    "geometry": (
        "Geometry",
        "from the first affine map's probe before the first update: mean and standard deviation of the lengths of "
        "normalised inputs, and the participation ratio of their second moments (1 on a line, n in all directions of "
        "n). Mean lengths are equal where they differ by at most 5%; inputs have one length where the deviation is at "
        "most 10% of the radius. A cloud keeps mean and deviation of what “none” has, within 5%; points have one "
        "length, the radius, and at most 1.05 directions; a circle the same and more than 1.5 directions; a disc has "
        "a mean length below the radius, lengths that differ, and more than 1.5 directions. Each must hold in every "
        "trial of the arm. There is no chance in it beyond the sample drawn, so no p-value; a trial's seed does not "
        "change that sample, so trials that differ in their seeds alone repeat one another.",
    ),
}


def methods(spec: StudySpec, resamples: int) -> str:
    """What was computed, by what, and what it cannot tell; one line per topic, as "Topic: text"."""
    budget = spec.training.budget.model_dump(exclude_none=True)
    unit = next(iter(budget))
    topics = {
        "Design": (
            "fixed_lr. The effect of batch size is estimated within each learning rate (and each level of the other"
            " axes that the study varies), then combined. The learning rates were not tuned for each "
            "batch size."
        ),
        "Budget and confounding": (
            f"by {unit}: every trial trained for {budget_text(budget)}, and its outcome is test accuracy after the"
            f" last one. {budget_caution(budget)}; this study's design does not separate the "
            "two. A slope here is the effect of batch size together with the "
            f"{'more samples' if unit == 'updates' else 'fewer steps'} that come with it."
        ),
        "Slope": (
            "least squares of test accuracy on log₂ batch size within each stratum (one level of every axis but"
            " batch size and normaliser) and seed. A seed's slope is the mean over strata, an arm's the mean over "
            "seeds. Where outcomes are missing, seeds or cells are dropped until every seed kept has the same cells, "
            "so that all seeds are averaged over the same strata; a stratum with fewer than two batch sizes has no "
            "slope."
        ),
        "Intervals": (
            f"bootstrap over seeds ({resamples} resamples, the same seeds for every arm), with percentiles "
            "stretched about the mean by √(n/(n−1)) · t(n−1)/z for n seeds, because the plain percentile interval"
            " is too narrow at few seeds. Measured coverage: Normstudy's docs/science.md, “How well it is calibrated”."
        ),
        "p-values": (
            f"two-sided permutation test of the slope ({resamples} draws, with the +1 correction). Batch-size "
            "labels are permuted within learning rate × seed, by one relabelling for all strata of a seed, "
            "because those trials share initialisation and data order. Few batch sizes and seeds have few "
            "relabellings, which bounds the smallest p-value. A second p-value, Student's t on the seeds' slopes,"
            " guards against seeds that differ in their slopes, of which the permutation test knows nothing. "
            "Holm's adjustment of either is over all arms of the study; an arm without a p-value counts as 1."
        ),
        "Spearman's ρ": ("rank correlation of accuracy with batch size within strata and seeds, pooled."),
        "Verdicts": (
            "an arm is flat where its whole interval lies within ± the smallest slope of interest; otherwise "
            "negative or positive where the interval excludes zero and both Holm-adjusted p-values are at most "
            "alpha; otherwise undecided. Flatness is claimed at each arm's own level, without adjustment over "
            "arms. A hypothesis is supported where every arm it names has the claimed direction, contradicted "
            "where one is decided otherwise, and otherwise undecided."
        ),
        "Differences between learning rates": (
            "the slope within one learning rate is the mean over the other strata, with an interval from the same "
            "resamples. It is flat, or accuracy falls or rises there, by that interval alone, without adjustment "
            "over learning rates or arms. An arm whose accuracy falls at one learning rate and rises at another is"
            " mixed: its verdict remains that of the combined slope, but it neither supports nor contradicts a "
            "hypothesis, because a mean over learning rates that disagree does not settle a claim about fixed "
            "ones. This rule only ever withholds an answer."
        ),
        **{_TOPICS[kind][0]: _TOPICS[kind][1] for kind in _TOPICS if kind in {h.kind for h in spec.hypotheses}},
        "Diverged trials": (
            "count at chance accuracy. Every verdict is also computed with them excluded, and where the two "
            "disagree the answer says so."
        ),
        "Randomness": ("all draws are seeded from the spec's hash: the same table and spec give the same figures."),
    }
    return "\n".join(f"{topic}: {text}" for topic, text in topics.items())


def provisional(planned: int, by_state: Mapping[str, int]) -> str | None:
    """Provisional: 30 of 72 planned trials have no result (30 cancelled). None where none lacks one."""
    absent = {state: n for state in ("cancelled", "lost", "failed") if (n := by_state.get(state, 0))}
    if not absent:
        return None
    total = sum(absent.values())
    which = listed([f"{n} {state}" for state, n in absent.items()])
    return f"Provisional: {total} of {planned} planned trials {'has' if total == 1 else 'have'} no result ({which})."
