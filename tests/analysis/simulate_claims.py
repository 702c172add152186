"""Outcomes with a known truth for rankings and peaks over width, and the measurements of their error rates.

python -m tests.analysis.simulate_claims       # a few minutes
"""

import math
from collections.abc import Sequence

import numpy as np

from analysis.ranking import answer_ranking
from analysis.resampling import seeds_test
from analysis.table import Outcomes, Stratum
from analysis.tuned import Tuned, tuned
from analysis.width import answer_width_peak
from trials.spec.models import Ranking, WidthPeak

ARMS = ("norm_like", "none", "affine_like")
RANKING = Ranking(kind="ranking", tiers=[["norm_like"], ["none", "affine_like"]], smallest_difference=1e-9)
"""With so small a difference of interest no pair is "equal", which could hide a false positive."""

PEAK = WidthPeak(kind="width_peak", arms=list(ARMS))
RATES = (0.01, 0.03, 0.1, 0.3)
EVEN, ONE_NOISY, TWO_NOISY = (0.005, 0.005, 0.005), (0.02, 0.005, 0.005), (0.005, 0.02, 0.02)


def simulated_tuned(
    seeds: int, widths: Sequence[float], rng: np.random.Generator, noise: Sequence[float] = EVEN, shared: float = 0.9
) -> Tuned:
    """Three arms at four learning rates that are all equally good: the worst case for choosing among them.

    Args:
        widths: true accuracy at each width, the same for every arm.
        noise: standard deviation of a trial's accuracy, of each of `ARMS`.
        shared: correlation between a trial's validation and test accuracy.
    """
    shape = (len(ARMS), len(widths), len(RATES), seeds, 1)
    scale = np.asarray(noise)[:, None, None, None, None]
    luck = scale * rng.normal(size=shape)
    test = shared * luck + math.sqrt(1 - shared**2) * scale * rng.normal(size=shape)
    level = np.asarray(widths)[None, :, None, None, None] + 0.01 * rng.normal(size=(1, 1, 1, seeds, 1))
    flat = (len(ARMS), len(widths) * len(RATES), seeds, 1)
    strata = tuple(
        Stratum(rate, 2**w, 1, "tanh", "pre", False, None, None, None, None, "sgd", 0.0)
        for w in range(len(widths))
        for rate in RATES
    )
    accuracy, validation = (level + test).reshape(flat), (level + luck).reshape(flat)
    never = np.full(flat, np.nan)
    outcomes = Outcomes(
        ARMS, strata, tuple(range(seeds)), (32,), accuracy, validation, never, accuracy.size, {}, 0.1, (), ()
    )
    return tuned(outcomes, "chance")


def ranking_false_positives(
    studies: int, seeds: int, rng: np.random.Generator, *, noise: Sequence[float] = EVEN, strata: int = 1, **more: float
) -> tuple[float, float]:
    """Shares of null studies with (any pair decided, any pair that Student's t at the chosen learning rates with
    Bonferroni's correction alone would have decided).
    """
    decided = plain = 0
    for _ in range(studies):
        found = simulated_tuned(seeds, [0.5] * strata, rng, noise, **more)
        answer = answer_ranking(0, RANKING, found, str(rng.integers(2**62)), 199).ranking
        assert answer is not None
        decided += any(pair.verdict in ("higher", "lower") for pair in answer.pairs)
        values = found.test.mean(axis=1)
        plain += min(seeds_test(values[0] - other) for other in values[1:]) * 2 <= 0.05
    return decided / studies, plain / studies


def peak_false_positives(
    studies: int, seeds: int, widths: Sequence[float], rng: np.random.Generator, noise: Sequence[float] = EVEN
) -> tuple[float, float]:
    """Shares of studies with (any arm called a peak, any arm called without one)."""
    peaks = none = 0
    for _ in range(studies):
        found = simulated_tuned(seeds, widths, rng, noise)
        levels = [2**w for w in range(len(widths))]
        answer = answer_width_peak(0, PEAK, found, levels, str(rng.integers(2**62)), 199).width_peak
        assert answer is not None
        peaks += any(arm.verdict == "peak" for arm in answer.arms)
        none += any(arm.verdict == "no peak" for arm in answer.arms)
    return peaks / studies, none / studies


def main() -> None:
    rng = np.random.default_rng(20261203)
    for seeds in (3, 5, 10):
        for noise in (EVEN, ONE_NOISY, TWO_NOISY):
            for strata in (1, 4):
                ours, plain = ranking_false_positives(1000, seeds, rng, noise=noise, strata=strata)
                print(
                    f"1000 null rankings, {seeds} seeds, noise {noise}, {strata} strata: {ours:.4f}, plain {plain:.4f}"
                )
    plateau = (0.3, 0.4, 0.5, 0.5, 0.5, 0.5)
    for seeds in (3, 5, 10):
        for name, widths in (("plateau", plateau), ("flat", (0.5,) * 6)):
            peaks, none = peak_false_positives(500, seeds, widths, rng)
            print(f"500 studies, {seeds} seeds, {name} over width: peak {peaks:.4f}, no peak {none:.4f}")


if __name__ == "__main__":
    main()
