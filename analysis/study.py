"""`analyse`: results table and spec → the study's verdict. Pure: same table and spec, same figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from analysis.estimators import SMALLEST_SPREAD, Block, balanced, curve_columns, seed_slopes, slope_weights, spearman
from analysis.geometry import answer_geometry
from analysis.holm import holm
from analysis.hypotheses import judge_arm, judge_hypothesis, judgement, rate_direction, seen, with_diverged_excluded
from analysis.ranking import answer_ranking
from analysis.resampling import RESAMPLES, Bootstrap, bootstrap, permutation_test, seeds_test, stream
from analysis.result import (
    SCHEMA_VERSION,
    ArmJudgement,
    ArmResult,
    Counts,
    CurvePoint,
    ExcludingDiverged,
    Exclusion,
    HypothesisResult,
    Interval,
    RateResult,
    RateSlope,
    StudyAnalysis,
    StudyName,
    rounded,
    rounded_interval,
)
from analysis.table import Outcomes, Treatment, first_probes, read_outcomes
from analysis.tuned import Tuned, tuned
from analysis.width import answer_width_peak
from analysis.wording import arm_name, counted, listed, methods, provisional
from trials.spec import StudySpec
from trials.spec.models import BatchSizeSlope, Geometry, Hypothesis, Ranking

_DEFAULT_ALPHA: float = BatchSizeSlope.model_fields["alpha"].default
_DEFAULT_SMALLEST_SLOPE: float = BatchSizeSlope.model_fields["smallest_slope"].default


@dataclass(frozen=True)
class _Estimate:
    """One arm under one treatment of diverged trials, before any alpha is chosen."""

    block: Block
    n_trials: int
    batch_sizes: tuple[int, ...]
    slope: float | None
    spearman: float | None
    p_value: float | None
    p_seeds: float | None
    p_holm: float | None
    p_seeds_holm: float | None
    smallest_p: float | None
    failure: str | None
    resampled: Bootstrap | None  # column 0 is the slope, the others are the slopes within learning rates
    rate_slopes: dict[float | None, float | None]  # by learning rate, ascending

    def interval(self, alpha: float) -> Interval | None:
        return self._interval(0, alpha)

    def rates(self, smallest_slope: float, alpha: float) -> list[RateSlope]:
        found = []
        for column, (rate, slope) in enumerate(self.rate_slopes.items(), start=1):
            interval = None if slope is None else self._interval(column, alpha)
            found.append(RateSlope(rate, slope, interval, rate_direction(interval, smallest_slope)))
        return found

    def _interval(self, column: int, alpha: float) -> Interval | None:
        return None if self.resampled is None else rounded_interval(self.resampled.interval(column, alpha))


def analyse(table: pa.Table, spec: StudySpec, *, resamples: int = RESAMPLES) -> StudyAnalysis:
    """Answer the study's hypotheses.

    Args:
        table: rows of `trials.records.RESULTS_SCHEMA` in any order.
        spec: the study they belong to.
        resamples: bootstrap resamples and permutations.

    Raises:
        AnalysisError: where the table is not a results table, or has two rows for one trial.
    """
    outcomes = read_outcomes(table, spec)
    main = _estimates(outcomes, "chance", spec, resamples)
    other = _estimates(outcomes, "excluded", spec, resamples) if outcomes.diverged else None
    hypotheses = _hypotheses(table, outcomes, main, other, spec, resamples)
    return StudyAnalysis(
        schema=SCHEMA_VERSION,
        study=StudyName(spec.name, spec.content_hash()),
        design=spec.design,
        budget=spec.training.budget.model_dump(exclude_none=True),
        counts=Counts(outcomes.planned, outcomes.by_state),
        provisional=provisional(outcomes.planned, outcomes.by_state),
        chance_accuracy=_rounded(outcomes.chance_accuracy),
        paper=seen(spec.paper, hypotheses) if spec.paper else None,
        arms=tuple(
            _arm(arm, main[a], other[a] if other else None, outcomes, spec, resamples)
            for a, arm in enumerate(outcomes.arms)
        ),
        hypotheses=hypotheses,
        exclusions=(*outcomes.exclusions, *_balance_exclusions(outcomes, main), *_attrition_notes(outcomes)),
        attrition=tuple(a for a in outcomes.attrition if a.diverged or a.missing),
        methods=methods(spec, resamples),
    )


def _estimates(outcomes: Outcomes, treatment: Treatment, spec: StudySpec, resamples: int) -> list[_Estimate]:
    values = outcomes.under(treatment)
    estimates = [
        _estimate(values[a], outcomes, spec.content_hash(), arm, resamples) for a, arm in enumerate(outcomes.arms)
    ]
    adjusted = holm([e.p_value for e in estimates]), holm([e.p_seeds for e in estimates])
    return [
        replace(e, p_holm=_rounded(p), p_seeds_holm=_rounded(q)) for e, p, q in zip(estimates, *adjusted, strict=True)
    ]


def _estimate(values: np.ndarray, outcomes: Outcomes, spec_hash: str, arm: str, resamples: int) -> _Estimate:
    """`values[stratum, seed, level]` of one arm."""
    block, levels, rates = balanced(values.transpose(1, 0, 2)), np.array(outcomes.levels), outcomes.by_rate
    used = block.cells[block.strata].any(axis=0)
    sizes = tuple(int(b) for b in levels[used])
    n_trials = int(np.isfinite(block.values).sum())
    failure = _no_slope(block)
    if failure is not None:
        none = dict.fromkeys(rates)
        return _Estimate(block, n_trials, sizes, None, None, None, None, None, None, None, failure, None, none)
    weights = slope_weights(block.cells, levels)
    slopes = seed_slopes(block, weights)
    within = [seed_slopes(block, slope_weights(block.cells & strata[:, None], levels)) for strata in rates.values()]
    rate_slopes = {
        rate: rounded(column.mean()) if (block.strata & strata).any() else None
        for (rate, strata), column in zip(rates.items(), within, strict=True)
    }
    slope, rho = rounded(slopes.mean()), _rounded(spearman(block))
    failure = _no_inference(slopes)
    p_value = p_seeds = smallest_p = resampled = None
    if failure is None:
        resampled = bootstrap(np.column_stack([slopes, *within]), stream(spec_hash, "bootstrap"), resamples)
        test = permutation_test(block.values, weights, stream(spec_hash, f"permutation/{arm}"), resamples)
        p_value, smallest_p = rounded(test.p_value), rounded(test.smallest_p)
        p_seeds = seeds_test(slopes)
    return _Estimate(
        block, n_trials, sizes, slope, rho, p_value, p_seeds, None, None, smallest_p, failure, resampled, rate_slopes
    )


def _no_slope(block: Block) -> str | None:
    if not len(block.seeds):
        return "no trial has an outcome"
    if not block.strata.any():
        return "a slope needs at least two batch sizes with outcomes in the same stratum"
    if np.nanmax(block.values) - np.nanmin(block.values) <= SMALLEST_SPREAD:
        return "zero variance: every trial has the same outcome"
    return None


def _no_inference(slopes: np.ndarray) -> str | None:
    if len(slopes) < 2:
        return "one seed: an interval and a p-value need at least two"
    if np.ptp(slopes) <= SMALLEST_SPREAD:
        return "zero variance: every seed has exactly the same slope"
    return None


def _arm(
    arm: str, main: _Estimate, other: _Estimate | None, outcomes: Outcomes, spec: StudySpec, resamples: int
) -> ArmResult:
    own = next((h for h in spec.hypotheses if isinstance(h, BatchSizeSlope) and arm in h.arms), None)
    alpha = own.alpha if own else _DEFAULT_ALPHA
    smallest_slope = own.smallest_slope if own else _DEFAULT_SMALLEST_SLOPE
    judged = _judgement(arm, main, smallest_slope, alpha)
    excluding = None
    if other is not None:
        without = _judgement(arm, other, smallest_slope, alpha)
        excluding = ExcludingDiverged(
            slope=other.slope,
            interval=without.interval,
            p_value=other.p_value,
            p_holm=other.p_holm,
            p_seeds_holm=other.p_seeds_holm,
            n_trials=other.n_trials,
            verdict=without.verdict,
            reason=without.reason,
            mixed_over_learning_rates=without.mixed,
        )
    curve, rate_curves = _curves(main.block, outcomes, alpha, spec.content_hash(), resamples)
    rates = main.rates(smallest_slope, alpha)
    return ArmResult(
        normaliser=arm,
        slope=main.slope,
        interval=judged.interval,
        alpha=alpha,
        smallest_slope=smallest_slope,
        p_value=main.p_value,
        p_holm=main.p_holm,
        p_seeds_holm=main.p_seeds_holm,
        smallest_p=main.smallest_p,
        spearman=main.spearman,
        n_trials=main.n_trials,
        n_seeds=len(main.block.seeds),
        batch_sizes=main.batch_sizes,
        verdict=judged.verdict,
        reason=judged.reason,
        mixed_over_learning_rates=judged.mixed,
        excluding_diverged=excluding,
        sensitive_to_diverged=excluding is not None and excluding.verdict != judged.verdict,
        curve=curve,
        by_learning_rate=tuple(
            RateResult(r.learning_rate, r.slope, r.interval, r.direction, c)
            for r, c in zip(rates, rate_curves, strict=True)
        ),
    )


def _judgement(arm: str, estimate: _Estimate, smallest_slope: float, alpha: float) -> ArmJudgement:
    interval = estimate.interval(alpha)
    verdict = judge_arm(
        interval,
        estimate.p_holm,
        estimate.p_seeds_holm,
        estimate.smallest_p,
        smallest_slope,
        alpha,
        estimate.failure,
    )
    p_values = estimate.p_holm, estimate.p_seeds_holm
    return judgement(arm, estimate.slope, interval, p_values, verdict, estimate.rates(smallest_slope, alpha))


def _hypotheses(
    table: pa.Table,
    outcomes: Outcomes,
    main: Sequence[_Estimate],
    other: Sequence[_Estimate] | None,
    spec: StudySpec,
    resamples: int,
) -> tuple[HypothesisResult, ...]:
    probes = first_probes(table, spec) if any(isinstance(h, Geometry) for h in spec.hypotheses) else {}
    spec_hash, widths = spec.content_hash(), spec.axes()["width"]
    needs_tuned = any(not isinstance(h, BatchSizeSlope | Geometry) for h in spec.hypotheses)

    def answer(
        index: int, hypothesis: Hypothesis, estimates: Sequence[_Estimate], best: Tuned | None
    ) -> HypothesisResult:
        if isinstance(hypothesis, BatchSizeSlope):
            of = dict(zip(outcomes.arms, estimates, strict=True))
            judged = [_judgement(arm, of[arm], hypothesis.smallest_slope, hypothesis.alpha) for arm in hypothesis.arms]
            return judge_hypothesis(index, hypothesis, judged)
        if isinstance(hypothesis, Geometry):
            return answer_geometry(index, hypothesis, probes)
        assert best is not None
        if isinstance(hypothesis, Ranking):
            return answer_ranking(index, hypothesis, best, spec_hash, resamples)
        return answer_width_peak(index, hypothesis, best, widths, spec_hash, resamples)

    best = tuned(outcomes, "chance") if needs_tuned else None
    best_other = tuned(outcomes, "excluded") if needs_tuned and other is not None else None
    answers = []
    for index, hypothesis in enumerate(spec.hypotheses):
        result = answer(index, hypothesis, main, best)
        if other is not None and not isinstance(hypothesis, Geometry):
            excluding = answer(index, hypothesis, other, best_other)
            result = with_diverged_excluded(result, excluding, outcomes.diverged)
        answers.append(result)
    return tuple(answers)


def _curves(
    block: Block, outcomes: Outcomes, alpha: float, spec_hash: str, resamples: int
) -> tuple[tuple[CurvePoint, ...], list[tuple[CurvePoint, ...]]]:
    """The arm's curve over all strata, and within each learning rate, with intervals over seeds."""
    chosen = [np.ones(len(outcomes.strata), dtype=bool), *outcomes.by_rate.values()]
    found = [curve_columns(block, strata) for strata in chosen]
    columns = np.concatenate([means for means, _ in found], axis=1)
    there = np.flatnonzero(np.isfinite(columns).all(axis=0)) if len(columns) else np.array([], dtype=int)
    resampled = bootstrap(columns[:, there], stream(spec_hash, "bootstrap"), resamples) if len(there) else None
    place = {int(column): i for i, column in enumerate(there)}

    def point(curve: int, level: int) -> CurvePoint:
        column = place.get(curve * len(outcomes.levels) + level)
        batch_size = outcomes.levels[level]
        if resampled is None or column is None:
            return CurvePoint(batch_size, None, None, 0)
        interval = resampled.interval(column, alpha)
        if interval is not None:  # no accuracy lies outside 0 … 1
            interval = rounded_interval((max(0.0, interval[0]), min(1.0, interval[1])))
        return CurvePoint(batch_size, rounded(resampled.means[column]), interval, int(found[curve][1][level]))

    curves = [tuple(point(c, b) for b in range(len(outcomes.levels))) for c in range(len(chosen))]
    return curves[0], curves[1:]


def _balance_exclusions(outcomes: Outcomes, estimates: Sequence[_Estimate]) -> list[Exclusion]:
    """What was dropped so that every seed of an arm has the same cells, and levels an arm lacks."""
    notes = []
    for arm, estimate in zip(outcomes.arms, estimates, strict=True):
        block = estimate.block
        if block.left_out:
            parts = []
            if block.cells_dropped:
                cells = [_cell_text(outcomes, s, b) for s, b in block.cells_dropped[:5]]
                more = len(block.cells_dropped) - len(cells)
                parts.append(f"{listed(cells + ([f'{more} more'] if more else []))}, where some seeds have no outcome")
            if block.seeds_dropped:
                seeds = [str(outcomes.seeds[s]) for s in block.seeds_dropped[:10]]
                more = len(block.seeds_dropped) - len(seeds)
                parts.append(f"seed {listed(seeds + ([f'{more} more'] if more else []))}, which lacks outcomes")
            why = f"{arm_name(arm)}: left out so that every seed has the same cells: {'; '.join(parts)}"
            notes.append(Exclusion("trials left out for balance", block.left_out, why))
        lone = block.cells & ~block.strata[:, None]
        if lone.any() and len(outcomes.levels) > 1:
            why = f"{arm_name(arm)}: their stratum has outcomes at only one batch size, so it has no slope"
            notes.append(Exclusion("trials without a slope", int(lone.sum()) * len(block.seeds), why))
        lacking = [str(b) for b in outcomes.levels if b not in estimate.batch_sizes]
        if estimate.slope is not None and lacking:
            why = (
                f"{arm_name(arm)}: its slope is over batch sizes {listed([str(b) for b in estimate.batch_sizes])} only"
            )
            notes.append(Exclusion(f"batch sizes not used: {listed(lacking)}", len(lacking), why))
    return notes


def _cell_text(outcomes: Outcomes, stratum: int, level: int) -> str:
    """Batch size, and what of the stratum varies in this study."""
    text = f"batch size {outcomes.levels[level]}"
    for name, value in outcomes.strata[stratum]._asdict().items():
        if len({getattr(s, name) for s in outcomes.strata}) > 1:
            shown = f"{value:g}" if isinstance(value, float) else value
            text += f" at {name.replace('_', ' ')} {shown}"
    return text


def _attrition_notes(outcomes: Outcomes) -> list[Exclusion]:
    notes = []
    if outcomes.diverged:
        chance = outcomes.chance_accuracy
        at = "chance accuracy" if chance is None else f"chance accuracy ({chance:g})"
        why = f"not left out: counted at {at}; every verdict is also given with them excluded"
        notes.append(Exclusion("diverged trials", outcomes.diverged, why))
    for kind in ("diverged", "missing"):
        counts = {(a.normaliser, a.batch_size): (getattr(a, kind), a.planned) for a in outcomes.attrition}
        total = sum(count for count, _ in counts.values())
        if total and len({count for count, _ in counts.values()}) > 1:
            worst = sorted(counts, key=lambda key: -counts[key][0])[:3]
            named = [
                f"{arm_name(arm)} at batch size {b}, {counts[arm, b][0]} of {counts[arm, b][1]}"
                for arm, b in worst
                if counts[arm, b][0]
            ]
            why = (
                f"{kind} trials are not spread evenly over normalisers and batch sizes, which can bias slopes; "
                f"most of them: {'; '.join(named)}"
            )
            notes.append(Exclusion(f"uneven attrition: {counted(total, f'{kind} trial')}", total, why))
    return notes


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)
