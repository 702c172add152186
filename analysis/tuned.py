"""Every arm at its best learning rate, chosen on the validation split.

A *setting* is a learning rate with a weight decay; a *group* is one combination of every other axis,
batch size among them. Within a group the setting is chosen by mean validation accuracy over seeds, so
the test split never chooses. A trial's validation and test accuracy share the luck of its training,
though: the chosen setting looks better than it is, and more so for an arm that varies more. So every
seed is read a second time, at the setting that the *other* seeds chose (`held_out`), which its own luck
cannot have picked; a comparison must stand in both (`paired`).
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import stdtr

from analysis.estimators import SMALLEST_SPREAD, Block, balanced
from analysis.result import Chosen, Interval
from analysis.table import Outcomes, Treatment

Setting = tuple[float | None, float | None]
"""(learning rate, weight decay)"""


@dataclass(frozen=True)
class Tuned:
    """Test accuracies `[arm, group, seed]`, NaN where there is none."""

    arms: tuple[str, ...]
    groups: tuple[dict[str, Any], ...]  # axis → level
    settings: tuple[Setting, ...]
    chosen: np.ndarray  # `[arm, group]`, index of the setting by all seeds; −1 where none can be chosen
    test: np.ndarray  # at the setting chosen by all seeds
    held_out: np.ndarray  # at the setting chosen by the other seeds

    def choices(self, arm: str, groups: np.ndarray) -> tuple[Chosen, ...]:
        """How often each setting was chosen, over the groups given (`[group]`, booleans)."""
        count = Counter(int(c) for c in self.chosen[self.arms.index(arm)][groups] if c >= 0)
        rates = sorted({rate for rate, _ in self.settings if rate is not None})
        edges = (rates[0], rates[-1]) if len(rates) > 1 else ()
        return tuple(
            Chosen(*self.settings[index], strata=n, at_edge=self.settings[index][0] in edges)
            for index, n in sorted(count.items())
        )


def tuned(outcomes: Outcomes, treatment: Treatment) -> Tuned:
    """Choose within each arm and group.

    A setting is eligible where at least half as many seeds have an outcome as at the fullest one of its
    group. Of equally good settings the one with the smallest learning rate is taken.
    """
    split = [stratum._asdict() for stratum in outcomes.strata]
    settings = list(dict.fromkeys((axes.pop("learning_rate"), axes.pop("weight_decay")) for axes in split))
    settings.sort(key=lambda s: tuple((v is None, v or 0.0) for v in s))
    keys = [tuple(axes.values()) for axes in split]
    rest = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    names = dict(zip(keys, split, strict=True))
    groups = tuple({**names[key], "batch_size": b} for key in rest for b in outcomes.levels)
    n_levels = len(outcomes.levels)
    shape = (len(outcomes.arms), len(groups), len(settings), len(outcomes.seeds))
    test, validation = np.full(shape, np.nan), np.full(shape, np.nan)
    sources = outcomes.under(treatment), outcomes.validation_under(treatment)
    for i, (stratum, key) in enumerate(zip(outcomes.strata, keys, strict=True)):
        setting = settings.index((stratum.learning_rate, stratum.weight_decay))
        for level in range(n_levels):
            for target, source in zip((test, validation), sources, strict=True):
                target[:, rest[key] * n_levels + level, setting] = source[:, i, :, level]
    there = np.isfinite(test) & np.isfinite(validation)
    values, counts = np.where(there, validation, 0.0), there.astype(int)
    chosen = _best(values.sum(axis=-1), counts.sum(axis=-1))
    others = [
        _best(values.sum(axis=-1) - values[..., s], counts.sum(axis=-1) - counts[..., s]) for s in range(shape[-1])
    ]
    by_others = np.stack(others, axis=-1) if len(others) > 1 else chosen[..., None]  # one seed has no others
    test = np.where(there, test, np.nan)
    return Tuned(
        outcomes.arms,
        groups,
        tuple(settings),
        chosen,
        _at(test, np.broadcast_to(chosen[..., None], by_others.shape)),
        _at(test, by_others),
    )


def _best(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Index of the eligible setting with the highest mean, `[arm, group]`; −1 where there is none."""
    if not sums.size:
        return np.full(sums.shape[:-1], -1)
    eligible = (counts > 0) & (2 * counts >= counts.max(axis=-1, keepdims=True))
    means = np.where(eligible, np.round(sums / np.maximum(counts, 1), 12), -np.inf)
    return np.where(eligible.any(axis=-1), means.argmax(axis=-1), -1)


def _at(values: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """`values[arm, group, setting, seed]` at `choice[arm, group, seed]`."""
    if not values.size:
        return np.full(choice.shape, np.nan)
    found = np.take_along_axis(values, np.maximum(choice, 0)[:, :, None, :], axis=2)[:, :, 0]
    return np.where(choice >= 0, found, np.nan)


def both_balanced(test: np.ndarray, held_out: np.ndarray) -> tuple[Block, Block]:
    """Blocks of the same seeds and cells, where both have an outcome; `[seed, stratum, level]` each."""
    there = np.isfinite(test) & np.isfinite(held_out)
    block = balanced(np.where(there, test, np.nan))
    other = np.where(np.isfinite(block.values), held_out[block.seeds], np.nan)
    return block, replace(block, values=other)


@dataclass(frozen=True)
class Paired:
    """Student's t over seeds that must hold for the differences at the chosen settings and held out."""

    difference: float
    held_out: float
    p_two_sided: float
    p_greater: float  # one-sided, against a difference of at most zero


def paired(differences: np.ndarray, held_out: np.ndarray) -> Paired | None:
    """The smaller of the two mean differences over the larger of their standard errors.

    With fewer than two seeds or no spread between them there is no test: None. Where the two means differ in
    sign the statistic is 0. Error rates are measured in `tests/analysis/simulate.py`; either mean by itself
    exceeds them, the first where arms differ in spread, the second because seeds choose for each other.

    Args:
        differences, held_out: `[seed]`.
    """
    n = len(differences)
    if n < 2 or np.ptp(differences) <= SMALLEST_SPREAD:
        return None
    means = float(differences.mean()), float(held_out.mean())
    error = max(float(d.std(ddof=1)) for d in (differences, held_out)) / math.sqrt(n)
    smaller = min(means, key=abs) if means[0] * means[1] > 0 else 0.0
    p_greater = float(stdtr(n - 1, -smaller / error))
    return Paired(*means, p_two_sided=min(1.0, 2 * min(p_greater, 1 - p_greater)), p_greater=p_greater)


def within_unit(interval: Interval | None) -> Interval | None:
    """No accuracy lies outside 0 … 1."""
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))
