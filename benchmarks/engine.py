"""The engine against a plain PyTorch loop, `torch.func.vmap` and JAX: training throughput of one core.

    python -m benchmarks.engine [--widths 16] [--batches 8,32] [--lanes 4,16] [--rounds 5] [--clock cpu] [--json FILE]

All train an MLP 3072 → W → 10 (tanh, plain SGD) on the same resident data, from the same parameters
on the same batches, without evaluation, on one core with one thread. Before a shape is timed each of
them trains the same small pack, and where their losses differ no ratio is given. Rounds alternate
between all of them, the machine's own matrix product among them, so that a slow minute hits all
alike; figures are medians over rounds, in samples × lanes per second.

The plain loop has one lane; the others are tried at several lane counts, four learning rates per
seed, as studies have them. *Picked* is the lane count that the engine itself chooses in a study.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.common import about, arguments, gemm_works, grid_pack, interleaved, median, one_core, table, write_json
from benchmarks.contenders import Contender, Engine, PlainLoop, Vmap
from trials.engine import Dataset
from trials.engine.measure import choose_lanes_at_once
from trials.records import Pack

WIDTHS, BATCH_SIZES, LANES = (16, 64, 128), (8, 32, 128, 512), (4, 8, 16, 32, 64)
_design = {"rates": 4}  # learning rates of a seed, whose lanes share its batches
ROWS, UNIT = 8192, 512  # of the data set (100 MB, more than caches hold); samples of one call to a contender
MOST_BYTES = 32 * 2**20  # of a pack's weights: beyond caches more lanes only cost time here
TOLERANCE = 1e-3  # relative, of an epoch's mean loss: float32 sums in another order

HEAD = (
    *(
        "arm",
        "W",
        "B",
        "plain loop /s",
        "engine, best (lanes) /s",
        "÷ plain",
        "÷ plain, picked (lanes)",
        "÷ plain, 1 lane",
    ),
    *("÷ vmap, same pack", "÷ JAX, same pack", "÷ JAX, best of each"),
    *("of torch.mm's peak", "of the core's peak"),
)


@dataclass
class Cell:
    """One shape: its speeds by contender and lanes (`engine 16`), and what follows from them."""

    normaliser: str
    width: int
    batch_size: int
    picked: int
    largest_difference: float  # relative, of the contenders' losses from the engine's
    mm_peak: float  # FLOP/s of `torch.mm`
    peak: float  # FLOP/s of the best library's product
    speeds: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_comparable(self) -> bool:
        return self.largest_difference <= TOLERANCE

    def best(self, name: str) -> int | None:
        """The lane count at which a contender is fastest."""
        counts = [int(key.split()[1]) for key in self.speeds if key.split()[0] == name]
        return max(counts, key=lambda lanes: self.speeds[f"{name} {lanes}"], default=None)

    def figures(self) -> dict[str, float]:
        """Ratios by name; none where the losses differ."""
        if not self.is_comparable:
            return {}
        speeds, best = self.speeds, self.best("engine")
        engine, plain = speeds[f"engine {best}"], speeds["plain 1"]
        found = {
            "best_over_plain": engine / plain,
            "picked_over_plain": speeds[f"engine {self.picked}"] / plain,
            "one_lane_over_plain": speeds["engine 1"] / plain,
            "share_of_mm_peak": engine * common.flops_per_sample(self.width) / self.mm_peak,
            "share_of_peak": engine * common.flops_per_sample(self.width) / self.peak,
        }
        for name in ("vmap", "jax"):
            if (lanes := self.best(name)) is not None:
                found[f"over_{name}_same_pack"] = speeds[f"engine {lanes}"] / speeds[f"{name} {lanes}"]
                found[f"over_{name}_best"] = engine / speeds[f"{name} {lanes}"]
        return found

    def row(self) -> list[str]:
        found, best = self.figures(), self.best("engine")

        def ratio(name: str, form: str = ".1f") -> str:
            return format(found[name], form) if name in found else "–"

        return [
            *(self.normaliser, str(self.width), str(self.batch_size), f"{self.speeds['plain 1']:,.0f}"),
            f"{self.speeds[f'engine {best}']:,.0f} ({best})",
            ratio("best_over_plain"),
            f"{ratio('picked_over_plain')} ({self.picked})",
            ratio("one_lane_over_plain", ".2f"),
            *(ratio("over_vmap_same_pack"), ratio("over_jax_same_pack", ".2f"), ratio("over_jax_best", ".2f")),
            ratio("share_of_mm_peak", ".0%"),
            ratio("share_of_peak", ".0%") if self.is_comparable else f"losses differ by {self.largest_difference:.1e}",
        ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--widths", type=_numbers, default=WIDTHS)
    parser.add_argument("--batches", type=_numbers, default=BATCH_SIZES)
    parser.add_argument("--lanes", type=_numbers, default=LANES)
    parser.add_argument(
        "--rates", type=int, default=_design["rates"], help="learning rates per seed, which share its batches"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; warm-up comes on top")
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long each contender's turn is")
    parser.add_argument("--clock", choices=common.CLOCKS, default="wall", help="cpu: where others want the core too")
    parser.add_argument("--no-jax", action="store_true")
    options = parser.parse_args()
    _design["rates"] = options.rates
    core = one_core()
    context = about(clock=options.clock, rounds=options.rounds, pinned_to_core=core, threads=1)
    makers: dict[str, Any] = {"vmap": Vmap}
    if not options.no_jax:
        try:
            from benchmarks.jax_lanes import JaxLanes  # after the pinning: it makes its threads here

            makers["jax"] = JaxLanes
        except ImportError as error:
            print(f"JAX is left out ({error}); `pip install -e '.[bench]'` has it.", file=sys.stderr)
    data = common.random_dataset(ROWS)
    shapes = [(normaliser, w, b) for normaliser, w in _arms(options.widths) for b in options.batches]
    cells = []
    for normaliser, width, batch_size in shapes:
        cell = measure(normaliser, width, batch_size, data, makers, options)
        cells.append(cell)
        print("|", " | ".join(cell.row()), "|", file=sys.stderr, flush=True)
    markdown = table(HEAD, [cell.row() for cell in cells])
    print(markdown)
    found = [{**vars(cell), "figures": cell.figures()} for cell in cells]
    write_json(options.json, {"about": context, "warm_up": "two turns of each", "cells": found, "markdown": markdown})


def measure(normaliser: str, width: int, batch_size: int, data: Dataset, makers: dict[str, Any], options: Any) -> Cell:
    """Check, warm up and time one shape."""
    shape = {"normaliser": normaliser, "width": width, "batch_size": batch_size}
    counts = [n for n in options.lanes if n * width * common.FEATURES * 4 <= MOST_BYTES] or [min(options.lanes)]
    picked = choose_lanes_at_once(_pack(max(counts), shape), data)
    cell = Cell(normaliser, width, batch_size, picked, _difference(data, makers, shape), 0.0, 0.0)
    contenders: dict[str, Contender] = {"plain 1": PlainLoop(_pack(1, shape), data)}
    for lanes in sorted({1, picked, *counts}):
        contenders[f"engine {lanes}"] = Engine(_pack(lanes, shape), data)
    for name, make in makers.items():
        for lanes in _few(counts):
            contenders[f"{name} {lanes}"] = make(_pack(lanes, shape), data)
    calls = {name: _calls(contender, _lanes(name), options.seconds) for name, contender in contenders.items()}
    products = gemm_works(options.seconds / 6)
    works = {name: partial(_turn, contender, _lanes(name), calls[name]) for name, contender in contenders.items()}
    works |= {name: work for name, (_, work) in products.items()}
    cell.seconds = interleaved(works, options.rounds, common.CLOCKS[options.clock])
    cell.speeds = {name: calls[name] * UNIT * _lanes(name) / median(cell.seconds[name]) for name in contenders}
    rates = {name: operations / median(cell.seconds[name]) for name, (operations, _) in products.items()}
    cell.mm_peak, cell.peak = max(rates[name] for name in rates if name.startswith("mm ")), max(rates.values())
    return cell


def _difference(data: Dataset, makers: dict[str, Any], shape: dict[str, Any]) -> float:
    """Largest relative difference of anyone's losses from the engine's, over some training of 2 seeds × 2 rates.

    The engine with one lane at a time is among them. NaN where a loss is.
    """
    pack = grid_pack(2, 2, 1, **shape)
    orders = np.stack([np.random.default_rng([seed, 0]).permutation(ROWS)[: 2 * UNIT] for seed in pack.seeds])
    expected = Engine(pack, data).train(orders)
    found = [make(pack, data).train(orders) for make in (PlainLoop, *makers.values())]
    alone = [Engine(replace(pack, trials=(t,)), data).train(orders[[t.seed]]) for t in pack.trials]
    found.append(np.concatenate(alone))
    return float(np.max(np.abs(np.stack(found) / expected - 1)))


def _turn(contender: Contender, lanes: int, calls: int) -> None:
    for _ in range(calls):
        contender.train(_orders(_seeds(lanes)))


def _calls(contender: Contender, lanes: int, seconds: float) -> int:
    """Warm up, and how many calls take about `seconds`."""
    clock, orders = common.CLOCKS["cpu"], _orders(_seeds(lanes))
    contender.train(orders)
    started = clock()
    contender.train(orders)
    return max(1, round(seconds / (clock() - started)))


_generator = np.random.default_rng(0)


def _orders(seeds: int) -> np.ndarray:
    """Other rows at every call, so that none stays in a cache from the last."""
    return _generator.integers(0, ROWS, (seeds, UNIT))


def _pack(lanes: int, shape: dict[str, Any]) -> Pack:
    # Epochs without end: a pack that would be over soon is not measured by `choose_lanes_at_once`.
    return grid_pack(_seeds(lanes), min(lanes, _design["rates"]), 10_000, **shape)


def _seeds(lanes: int) -> int:
    return max(1, lanes // _design["rates"])


def _lanes(name: str) -> int:
    return int(name.split()[1])


def _few(counts: Sequence[int]) -> list[int]:
    """The smallest, a middle one and the largest: the others' best is seldom between, and compiling takes its time."""
    return sorted({counts[0], counts[len(counts) // 2], counts[-1]})


def _arms(widths: Sequence[int]) -> list[tuple[str, int]]:
    return [("none", width) for width in widths] + [("affine_like", width) for width in widths if width == 16]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main()
