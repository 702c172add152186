"""Lanes: which trials of a pack train side by side, and what trains them.

A block is a rectangle of lanes: groups (one per seed, whose lanes share every batch) × slots. A pack
is one block, or several where it trains fewer lanes at once. When lanes have died the living ones
are laid out anew, in smaller blocks; what a lane carries (`Trainer.state`) moves with it.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from trials.records import Pack


class Lanes(NamedTuple):
    """The lanes of a block, G groups × L slots; lane g·L + l is slot l of group g."""

    seeds: tuple[int, ...]  # one per group
    step_sizes: Tensor  # [G, L], float64
    weight_decays: Tensor  # [G, L], float64


class Trainer(Protocol):
    """Trains one block. Losses are summed over lanes and averaged over the batch, so no lane feels another."""

    lanes: int

    def train(self, orders: Tensor, first_update: int) -> Tensor:
        """Train on whole batches.

        Args:
            orders: rows of the training split in each group's order, int64 [G, steps · B].
            first_update: optimiser steps taken before, for the schedule.

        Returns:
            The sum over all samples of each lane's losses as they were trained on, float64 [N].
        """
        ...

    def evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy (nats) and accuracy of each lane over a whole split, float64 [N] each.

        Accuracy is NaN where the loss is not finite.
        """
        ...

    def squared_norms(self) -> Tensor:
        """Sum of squares of each lane's parameters, [N]."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that each lane carries: parameters, running statistics, optimiser state, each [N, ...]."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what lanes carried elsewhere, as `state` gives it, one row per lane of this block."""
        ...


@dataclass(frozen=True)
class Block:
    """Places in the pack of a block's lanes, group by group.

    A group that is short of lanes is filled up with copies of its first, whose numbers are nobody's.
    """

    groups: tuple[tuple[int, ...], ...]  # [G][L]

    @property
    def slots(self) -> tuple[int, ...]:
        """Place of each of the N lanes, copies included."""
        return tuple(itertools.chain.from_iterable(self.groups))

    @property
    def owners(self) -> dict[int, int]:
        """Place in the pack → lane of this block that carries it."""
        owners: dict[int, int] = {}
        for lane, place in enumerate(self.slots):
            owners.setdefault(place, lane)
        return owners


def lay_out(pack: Pack, places: Sequence[int], at_once: int) -> list[Block]:
    """Blocks of about `at_once` lanes for the trials of a pack at `places`, in the pack's order.

    The lanes of one seed stay together, as sharing a batch is what makes them cheap: blocks are cut
    between seeds first and within a seed only where it has more than `at_once` lanes.

    A lane that is left alone gets a copy beside it: libraries add up in another order for one lane
    than for several, and a lane's numbers shall not depend on how many others there are.
    """
    by_seed: dict[int, list[int]] = {}
    for place in places:
        by_seed.setdefault(pack.trials[place].seed, []).append(place)
    rows = [row[start : start + at_once] for row in by_seed.values() for start in range(0, len(row), at_once)]
    rows.sort(key=len, reverse=True)
    blocks: list[list[list[int]]] = []
    for row in rows:
        widest = _slots(blocks[-1], pack) if blocks else 0
        # A row of less than half a block's width would be filled up with more copies than lanes.
        if not blocks or widest * (len(blocks[-1]) + 1) > at_once or 2 * len(row) < widest:
            blocks.append([])
        blocks[-1].append(row)
    return [_rectangle(block, pack) for block in blocks]


def _slots(rows: Sequence[Sequence[int]], pack: Pack) -> int:
    return max(len(rows[0]), min(2, len(pack.settings)))


def _rectangle(rows: Sequence[Sequence[int]], pack: Pack) -> Block:
    slots = _slots(rows, pack)
    groups = [(*row, *[row[0]] * (slots - len(row))) for row in rows]
    copies = 1 if slots == len(groups) == 1 < len(pack.trials) else 0
    return Block(tuple(groups + groups[:1] * copies))
