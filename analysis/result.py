"""What an analysis says: frozen records that become `verdict.json` by `.to_dict()`.

Numbers are rounded once, when they are made (`rounded`), and judged as rounded: the file, the
report and the verdict cannot disagree. A quantity that cannot be computed is None, never NaN.
"""

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

Interval = tuple[float, float]
ArmVerdict = Literal["negative", "positive", "flat", "undecided"]
RateDirection = Literal["falls", "rises", "flat", "unclear"]
StudyVerdict = Literal["supported", "contradicted", "undecided"]
PairVerdict = Literal["higher", "lower", "equal", "undecided"]
PeakVerdict = Literal["peak", "no peak", "undecided"]
ShapeVerdict = Literal["as claimed", "otherwise", "unknown"]
Seen = Literal["seen", "not seen", "undecided"]

DECIMALS = 6
"""Decimals kept of slopes, accuracies and p-values: a ten-thousandth of a percentage point."""

SCHEMA_VERSION = 1


def rounded(value: float) -> float | None:
    """A plain float with `DECIMALS` decimals; None where the value is not finite; never −0.0."""
    value = float(value)
    return round(value, DECIMALS) + 0.0 if math.isfinite(value) else None


def rounded_interval(interval: Interval | None) -> Interval | None:
    """Both ends as `rounded`; None where either is not finite."""
    if interval is None:
        return None
    low, high = rounded(interval[0]), rounded(interval[1])
    return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class _Record:
    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON-able: dicts, lists, text, finite numbers, booleans and None only."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class CurvePoint(_Record):
    """Mean test accuracy at one batch size, over seeds and strata."""

    batch_size: int
    mean: float | None
    interval: Interval | None
    n: int  # trials in the mean


@dataclass(frozen=True)
class RateSlope(_Record):
    """The slope within one learning rate, over the other strata axes; the rate is None where the table has none.

    Descriptive: each interval stands alone, without adjustment over learning rates or arms. A rate is
    `flat` where its whole interval lies within ± the smallest slope of interest, `falls` or `rises` where
    the interval excludes zero otherwise, `unclear` in all other cases and where there is no interval.
    """

    learning_rate: float | None
    slope: float | None
    interval: Interval | None  # at 1 − alpha of the arm or hypothesis it is given for
    direction: RateDirection


@dataclass(frozen=True)
class RateResult(RateSlope):
    """One learning rate of one arm: its slope, and its curve."""

    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class ExcludingDiverged(_Record):
    """The same arm with its study's diverged trials left out instead of counted at chance."""

    slope: float | None
    interval: Interval | None
    p_value: float | None
    p_holm: float | None
    p_seeds_holm: float | None
    n_trials: int
    verdict: ArmVerdict
    reason: str
    mixed_over_learning_rates: bool


@dataclass(frozen=True)
class ArmResult(_Record):
    """One normaliser. Slopes are in accuracy (share) per doubling of batch size."""

    normaliser: str
    slope: float | None
    interval: Interval | None  # at 1 − alpha
    alpha: float
    smallest_slope: float
    p_value: float | None
    p_holm: float | None
    p_seeds_holm: float | None  # of Student's t on the seeds' slopes: must also be at most alpha
    smallest_p: float | None  # the smallest p-value this arm's design can give
    spearman: float | None
    n_trials: int
    n_seeds: int
    batch_sizes: tuple[int, ...]  # the levels the slope is over
    verdict: ArmVerdict  # of the combined slope, also where it is mixed
    reason: str
    mixed_over_learning_rates: bool  # accuracy falls at one learning rate at least, and rises at another
    excluding_diverged: ExcludingDiverged | None
    sensitive_to_diverged: bool
    curve: tuple[CurvePoint, ...]
    by_learning_rate: tuple[RateResult, ...]


@dataclass(frozen=True)
class ArmJudgement(_Record):
    """One named arm under one hypothesis' own smallest slope and alpha."""

    normaliser: str
    slope: float | None
    interval: Interval | None
    p_holm: float | None
    p_seeds_holm: float | None
    verdict: ArmVerdict
    reason: str
    falls_at: tuple[float | None, ...]  # learning rates
    rises_at: tuple[float | None, ...]

    @property
    def mixed(self) -> bool:
        return bool(self.falls_at and self.rises_at)


@dataclass(frozen=True)
class Chosen(_Record):
    """A learning rate that was best by validation, and in how many strata of the arm."""

    learning_rate: float | None
    weight_decay: float | None
    strata: int
    at_edge: bool  # the smallest or largest listed, so that a better one may lie beyond


@dataclass(frozen=True)
class TunedArm(_Record):
    """Mean test accuracy of one arm at its best learning rates, over seeds and strata."""

    normaliser: str
    mean: float | None
    interval: Interval | None
    n_seeds: int
    n_strata: int
    chosen: tuple[Chosen, ...]


@dataclass(frozen=True)
class PairResult(_Record):
    """Test accuracy of `better` less that of `worse`, as the order claims them; paired by seed."""

    better: str
    worse: str
    difference: float | None
    interval: Interval | None  # at 1 − alpha
    held_out_difference: float | None  # each seed at the learning rates that the other seeds chose
    p_value: float | None
    p_holm: float | None
    n_seeds: int
    n_strata: int
    verdict: PairVerdict
    reason: str


@dataclass(frozen=True)
class RankingResult(_Record):
    """What a `ranking` found."""

    tiers: tuple[tuple[str, ...], ...]
    smallest_difference: float
    arms: tuple[TunedArm, ...]
    pairs: tuple[PairResult, ...]


@dataclass(frozen=True)
class WidthPoint(_Record):
    """Mean test accuracy at one width, at its best learning rates."""

    width: int
    mean: float | None
    interval: Interval | None
    n: int  # trials in the mean
    share_highest: float | None  # of the bootstrap's resamples in which this width is the highest


@dataclass(frozen=True)
class Change(_Record):
    """A difference of mean test accuracy between two widths, with Student's t one-sided p-value of its being > 0."""

    difference: float | None
    interval: Interval | None
    p_value: float | None


@dataclass(frozen=True)
class PeakArm(_Record):
    """One arm's curve over width."""

    normaliser: str
    peak: int | None  # the width with the highest mean
    rise: Change  # the highest mean less that at the smallest width
    fall: Change  # the highest mean less that at the largest width
    p_holm: float | None  # of a peak; where the highest is at an end, of there being none
    n_seeds: int
    verdict: PeakVerdict
    reason: str
    curve: tuple[WidthPoint, ...]


@dataclass(frozen=True)
class WidthPeakResult(_Record):
    """What a `width_peak` found."""

    arms: tuple[PeakArm, ...]


@dataclass(frozen=True)
class ShapeArm(_Record):
    """What one normaliser makes of the inputs: means over trials of the first probe of the first affine map."""

    normaliser: str
    norm_mean: float | None
    norm_sd: float | None
    directions: float | None
    n_trials: int
    verdict: ShapeVerdict
    reason: str


@dataclass(frozen=True)
class GeometryResult(_Record):
    """What a `geometry` found."""

    shape: str
    radius: float | None
    tolerance: float  # share by which a mean length may differ and still be equal
    one_length: float  # largest deviation of equal lengths, as a share of the radius
    arms: tuple[ShapeArm, ...]


@dataclass(frozen=True)
class HypothesisResult(_Record):
    """The answer to one stated hypothesis. `direction` to `judgements` are of a `batch_size_slope`; of the other
    kinds, one of `ranking`, `width_peak` and `geometry` has what was found.
    """

    index: int
    kind: str
    claim: str
    arms: tuple[str, ...]
    alpha: float | None  # None for geometry, which has no error rate
    verdict: StudyVerdict
    sentence: str
    direction: str | None = None
    smallest_slope: float | None = None
    mixed_over_learning_rates: bool = False  # of any named arm
    judgements: tuple[ArmJudgement, ...] = ()
    ranking: RankingResult | None = None
    width_peak: WidthPeakResult | None = None
    geometry: GeometryResult | None = None
    verdict_excluding_diverged: StudyVerdict | None = None
    sensitive_to_diverged: bool = False


@dataclass(frozen=True)
class PaperResult(_Record):
    """A row of the paper beside what this study saw of it, as far as its hypotheses test the row."""

    row: str
    outcome: str
    seen: Seen
    sentence: str


@dataclass(frozen=True)
class Exclusion(_Record):
    """Something that did not enter the estimates as it was planned to, how much, and why."""

    what: str
    count: int
    why: str


@dataclass(frozen=True)
class Attrition(_Record):
    """Trials of one arm at one batch size that are not an ordinary success."""

    normaliser: str
    batch_size: int
    planned: int
    diverged: int
    missing: int


@dataclass(frozen=True)
class StudyName(_Record):
    name: str
    spec_hash: str


@dataclass(frozen=True)
class Counts(_Record):
    planned: int
    by_state: dict[str, int]


@dataclass(frozen=True)
class StudyAnalysis(_Record):
    """The whole of `verdict.json`."""

    schema: int
    study: StudyName
    design: str
    budget: dict[str, int]
    counts: Counts
    provisional: str | None  # said where planned trials have no result, so that the answers may change
    chance_accuracy: float | None
    paper: PaperResult | None
    arms: tuple[ArmResult, ...]
    hypotheses: tuple[HypothesisResult, ...]
    exclusions: tuple[Exclusion, ...]
    attrition: tuple[Attrition, ...]
    methods: str


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} in a result; quantities that cannot be computed are None")
        return float(value)
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"{value!r} has no place in a result")
