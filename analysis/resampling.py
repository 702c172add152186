"""Bootstrap over seeds and the permutation test. Every draw comes from a Generator passed in.

The seed is the unit: trials of one seed share initialisation and data order, so they are resampled,
and relabelled, together.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from analysis.estimators import SMALLEST_SPREAD

RESAMPLES = 9999
"""Bootstrap resamples and permutations; the smallest p-value is 1 / (RESAMPLES + 1)."""

_CHUNK = 2_000_000  # numbers drawn at once: keeps memory flat at thousands of seeds


def stream(spec_hash: str, purpose: str) -> np.random.Generator:
    """The Generator of one purpose of one study: same study, same figures.

    An arm's figures do not depend on which other arms the study has, or in what order.
    """
    digest = hashlib.sha256(f"{spec_hash}/{purpose}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


@dataclass(frozen=True)
class Bootstrap:
    """Seed means `means[column]` and their bootstrap distribution `draws[resample, column]`."""

    means: np.ndarray
    draws: np.ndarray
    n_seeds: int

    def interval(self, column: int, alpha: float) -> tuple[float, float] | None:
        """The small-sample calibrated percentile interval at level 1 − alpha.

        The percentile bootstrap of a mean of n values is too narrow twice over: its spread is short
        by √((n−1)/n), and it has no allowance for the spread being itself estimated (Hesterberg
        2015, "What teachers should know about the bootstrap"). Both are put right by stretching the
        percentiles about the mean by √(n/(n−1)) · t(n−1) / z. Measured coverage: docs/science.md.

        Returns:
            None where it cannot be computed: fewer than two seeds, or no spread between them.
        """
        deviations = self.draws[:, column] - self.means[column]
        if self.n_seeds < 2 or np.ptp(deviations) <= SMALLEST_SPREAD:
            return None
        stretch = math.sqrt(self.n_seeds / (self.n_seeds - 1)) * stdtrit(self.n_seeds - 1, 1 - alpha / 2)
        low, high = np.quantile(deviations, [alpha / 2, 1 - alpha / 2]) * stretch / ndtri(1 - alpha / 2)
        return float(self.means[column] + low), float(self.means[column] + high)


def bootstrap(values: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES) -> Bootstrap:
    """Resample seeds, the same ones for every column.

    Args:
        values: `[seed, column]`, finite. A Generator in the same state draws the same seeds, so
            arms stay paired.
    """
    n_seeds = len(values)
    draws = np.empty((resamples, values.shape[1]))
    step = max(1, _CHUNK // max(1, n_seeds))
    for start in range(0, resamples, step):
        size = min(step, resamples - start)
        times = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=size)
        draws[start : start + size] = times @ values / n_seeds
    return Bootstrap(values.mean(axis=0), draws, n_seeds)


def seeds_test(slopes: np.ndarray) -> float:
    """Two-sided p-value of "the mean slope over seeds is zero": Student's t on the seeds' slopes `[seed]`.

    The permutation test's null is that batch size changes nothing for any seed. Where it does, up for some
    seeds and down for others, that null is false though the mean slope is zero; this one still holds.
    """
    error = slopes.std(ddof=1) / math.sqrt(len(slopes))
    return float(2 * stdtr(len(slopes) - 1, -abs(slopes.mean()) / error))


@dataclass(frozen=True)
class Permutation:
    p_value: float
    smallest_p: float  # what the design and the number of draws allow at best


def permutation_test(
    values: np.ndarray, weights: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Permutation:
    """Two-sided test of "batch size makes no difference" with the mean slope as its statistic.

    Batch-size labels are permuted within each seed, by one relabelling for all of its strata: those
    trials are not independent, and the joint relabelling keeps whatever they share. Levels are only
    exchanged with levels that are there in the same strata, which keeps the test exact where cells
    are missing. p = (1 + #{as extreme}) / (1 + draws), never 0.

    With few levels and seeds there are few relabellings: 2 batch sizes and 5 seeds have 2⁵, so no
    two-sided p below 2/2⁵ = 0.06 exists, whatever the data. `smallest_p` says so.

    Args:
        values: `[seed, stratum, level]`, a balanced block (NaN cells are NaN for all seeds).
        weights: `[stratum, level]` from `slope_weights`.
    """
    n_seeds, _, n_levels = values.shape
    used = np.isfinite(values[0]) & (weights != 0).any(axis=1, keepdims=True)
    groups = _exchangeable(used)
    filled = np.nan_to_num(values)
    observed = float(np.einsum("ksl,sl->", filled, weights))
    fixed = np.zeros(resamples)
    centre = 0.0
    step = max(1, _CHUNK // (resamples * n_levels))
    for start in range(0, n_seeds, step):
        seeds = filled[start : start + step]
        # gain[k, l, m]: what seed k adds to the statistic when level l's label falls on the outcome of level m
        gain = np.einsum("sl,ksm->klm", weights, seeds)
        for group in groups:
            part = gain[:, group][:, :, group]
            centre += float(part.mean(axis=2).sum())
            labels = np.broadcast_to(np.arange(len(group)), (resamples, len(seeds), len(group)))
            labels = rng.permuted(labels, axis=2) if len(group) > 1 else labels
            rows, columns = np.arange(len(seeds))[None, :, None], np.arange(len(group))[None, None, :]
            fixed += part[rows, columns, labels].sum(axis=(1, 2))
    as_extreme = np.abs(fixed - centre) >= abs(observed - centre) - SMALLEST_SPREAD * n_seeds
    p_value = (1 + int(as_extreme.sum())) / (1 + resamples)
    return Permutation(p_value, max(1 / (1 + resamples), _smallest(groups, n_seeds, weights)))


def _exchangeable(used: np.ndarray) -> list[np.ndarray]:
    """Groups of levels that are there in exactly the same strata."""
    groups: dict[bytes, list[int]] = {}
    for level in range(used.shape[1]):
        if used[:, level].any():
            groups.setdefault(used[:, level].tobytes(), []).append(level)
    return [np.array(group) for group in groups.values()]


def _smallest(groups: Sequence[np.ndarray], n_seeds: int, weights: np.ndarray) -> float:
    """1 / relabellings, or 2 / relabellings where reversing every seed's labels gives an equally extreme slope."""
    log_count = n_seeds * sum(math.lgamma(len(group) + 1) for group in groups)
    mirrored = len(groups) == 1 and np.allclose(weights[:, groups[0]], -weights[:, groups[0][::-1]])
    return min(1.0, (2 if mirrored else 1) * math.exp(-log_count))
