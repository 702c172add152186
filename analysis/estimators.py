"""Within-stratum slopes and rank correlations of one arm, on a balanced block of its trials.

A *stratum* is one combination of every axis but batch size, seed and normaliser: the fixed
learning-rate design reads the effect of batch size within each, then combines. A *cell* here is
stratum × batch size.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

SMALLEST_SPREAD = 1e-12
"""Accuracies or slopes closer together than this are the same number."""


@dataclass(frozen=True)
class Block:
    """One arm's outcomes after balancing, `values[seed, stratum, level]`.

    A cell is either there for every seed kept or NaN for all of them, so each seed's slope is the
    same function of the same cells, and seeds differ by chance alone.
    """

    values: np.ndarray
    seeds: np.ndarray  # indices of the seeds kept
    left_out: int  # outcomes that exist but were dropped for balance
    cells_dropped: tuple[tuple[int, int], ...]  # (stratum, level) indices, where other seeds had outcomes
    seeds_dropped: tuple[int, ...]  # indices, of seeds that had outcomes

    @property
    def cells(self) -> np.ndarray:
        """Which cells are there, `[stratum, level]`."""
        if not len(self.seeds):
            return np.zeros(self.values.shape[1:], dtype=bool)
        return np.isfinite(self.values[0])

    @property
    def strata(self) -> np.ndarray:
        """Which strata have a slope (two batch sizes or more), `[stratum]`."""
        return self.cells.sum(axis=1) >= 2


def balanced(outcomes: np.ndarray) -> Block:
    """The block of seeds × cells without holes.

    Cells and seeds with no outcome at all go first. While a hole is left, the seed or the cell with
    the largest share of holes goes (the choice that loses the fewest outcomes per hole closed).

    Args:
        outcomes: `[seed, stratum, level]`, NaN where a trial has no outcome.
    """
    n_seeds, n_strata, n_levels = outcomes.shape
    there = np.isfinite(outcomes).reshape(n_seeds, n_strata * n_levels)
    seeds, cells = np.asarray(there.any(axis=1)), np.asarray(there.any(axis=0))
    had_seeds, had_cells = seeds.copy(), cells.copy()
    while seeds.any() and cells.any():
        holes = ~there & seeds[:, None] & cells[None, :]
        if not holes.any():
            break
        by_seed, by_cell = holes.sum(axis=1) / cells.sum(), holes.sum(axis=0) / seeds.sum()
        if by_seed.max() > by_cell.max():
            seeds[by_seed.argmax()] = False
        else:
            cells[by_cell.argmax()] = False
    kept = seeds[:, None] & cells[None, :]
    values = np.where(kept, outcomes.reshape(there.shape), np.nan)[seeds].reshape(int(seeds.sum()), n_strata, n_levels)
    dropped = np.flatnonzero(had_cells & ~cells)
    return Block(
        values=values,
        seeds=np.flatnonzero(seeds),
        left_out=int((there & ~kept).sum()),
        cells_dropped=tuple((int(c) // n_levels, int(c) % n_levels) for c in dropped),
        seeds_dropped=tuple(int(s) for s in np.flatnonzero(had_seeds & ~seeds)),
    )


def slope_weights(cells: np.ndarray, batch_sizes: np.ndarray) -> np.ndarray:
    """Weights `[stratum, level]` whose sum with a seed's outcomes is its slope per doubling.

    That slope is the mean over strata of the least-squares slope of accuracy on log₂ batch size,
    within each stratum with two batch sizes or more.
    """
    doublings = np.log2(np.asarray(batch_sizes, dtype=float))
    counts = cells.sum(axis=1, keepdims=True)
    usable = counts[:, 0] >= 2
    centres = np.where(cells, doublings, 0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    deviations = np.where(cells & usable[:, None], doublings - centres, 0)
    squares = (deviations**2).sum(axis=1, keepdims=True)
    return deviations / np.where(squares > 0, squares, 1) / max(1, usable.sum())


def seed_slopes(block: Block, weights: np.ndarray) -> np.ndarray:
    """Slope per doubling of each seed kept, `[seed]`."""
    return np.einsum("ksl,sl->k", np.nan_to_num(block.values), weights)


def spearman(block: Block) -> float | None:
    """Rank correlation of accuracy with batch size, within strata × seeds.

    Ranks (ties share their mean) are taken within each stratum × seed, centred, and pooled into one
    correlation. Blocks of one size without ties weigh equally and the pooled value is the mean of their
    Spearman's ρ; a block whose accuracies are all equal pulls it towards 0. None where no accuracy
    differs from another.
    """
    lines = block.values[:, block.strata, :].reshape(-1, block.values.shape[-1])
    if not len(lines):
        return None
    ranks = pd.DataFrame(np.round(lines, 12)).rank(axis=1).to_numpy()
    orders = np.where(np.isfinite(lines), np.arange(lines.shape[1], dtype=float), np.nan)
    orders = pd.DataFrame(orders).rank(axis=1).to_numpy()
    ranks, orders = (np.nan_to_num(r - np.nanmean(r, axis=1, keepdims=True)) for r in (ranks, orders))
    norm = np.sqrt((ranks**2).sum() * (orders**2).sum())
    return float((ranks * orders).sum() / norm) if norm > 0 else None


def curve_columns(block: Block, strata: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each seed's mean accuracy per level over the strata given, and the trials in each mean.

    The mean is over the strata that have every level some of them has, so that one level's mean is
    comparable with the next; over whatever is there where no stratum is that complete.

    Returns:
        `[seed, level]` (NaN at a level without outcomes) and counts `[level]`.
    """
    cells = block.cells & strata[:, None]
    levels = cells.any(axis=0)
    complete = cells[:, levels].all(axis=1) & strata
    if complete.any():
        cells = cells & complete[:, None]
    counts = cells.sum(axis=0)
    sums = np.where(cells, np.nan_to_num(block.values), 0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), counts * len(block.seeds)
