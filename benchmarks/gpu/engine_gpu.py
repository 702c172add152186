"""The engine on a CUDA device: packs with captured graphs, the same packs eager, and a plain loop.

    python -m benchmarks.gpu.engine_gpu [--seconds 0.3] [--rounds 5] [--dry-run] [--json FILE]

From the repository's root, without installing it. Takes under five minutes at its defaults. Needs
torch with CUDA and NumPy, and nothing else.

Each pack is checked before it is timed: graphed and eager losses must be the same bits, and those of the
plain loop the same within float32's tolerance. Figures are medians over interleaved rounds, with the device
idle before and after each turn.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from benchmarks.common import (
    CLOCKS,
    about,
    arguments,
    grid_pack,
    interleaved,
    median,
    random_dataset,
    table,
    write_json,
)
from benchmarks.contenders import Contender, Engine, PlainLoop
from trials.engine import graphs
from trials.engine.graphs import set_numerics

ROWS, UNIT = 16_384, 2048  # of the data set; samples of one call
# (normaliser, optimiser, W, B, seeds, rates): the fast path at small and large batches and networks; one general pack
SHAPES = [
    ("none", "sgd", 16, 8, 4, 4),
    ("none", "sgd", 16, 8, 16, 4),
    ("none", "sgd", 16, 128, 16, 4),
    ("none", "sgd", 64, 32, 16, 4),
    ("none", "sgd", 128, 512, 16, 4),
    ("affine_like", "sgd", 16, 8, 16, 4),
    ("batch_norm", "sgd", 16, 32, 16, 4),
    ("none", "adam", 16, 32, 16, 4),
]
TOLERANCE = 1e-3
HEAD = (
    *("arm", "optimiser", "W", "B", "lanes", "plain loop /s", "eager /s", "graphs /s"),
    *("graphs ÷ eager", "graphs ÷ plain", "same bits", "from the plain loop"),
)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="about how long each contender's turn is")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: whether this script runs, no figures")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    if not options.dry_run and not torch.cuda.is_available():
        print("engine_gpu needs a CUDA device, and PyTorch finds none here; nothing was measured.", file=sys.stderr)
        return 2
    set_numerics(device)
    data = random_dataset(ROWS)
    cells = []
    for shape in SHAPES:
        try:
            cells.append(measure(shape, data, device, options))
        except Exception as error:  # one shape that fails must not take the lease's other figures along
            cells.append({"shape": shape, "error": repr(error)[:500]})
        print(cells[-1], file=sys.stderr, flush=True)
        name = "none: a dry run" if options.dry_run else torch.cuda.get_device_name()
        context = about(device=name, cuda=torch.version.cuda, rounds=options.rounds)
        markdown = table(HEAD, [row(cell) for cell in cells])
        write_json(
            options.json, {"about": context, "warm_up": "two calls of each", "cells": cells, "markdown": markdown}
        )
    print(table(HEAD, [row(cell) for cell in cells]))
    return 0


def measure(shape: tuple[str, str, int, int, int, int], data: Any, device: str, options: Any) -> dict[str, Any]:
    normaliser, optimiser, width, batch_size, seeds, rates = shape
    changes = {"normaliser": normaliser, "optimiser": optimiser, "width": width, "batch_size": batch_size}
    pack, one = grid_pack(seeds, rates, 10_000, **changes), grid_pack(1, 1, 10_000, **changes)
    is_plain_possible = optimiser == "sgd" and normaliser in ("none", "affine_like")
    orders = np.stack([np.random.default_rng([seed, 0]).permutation(ROWS)[:UNIT] for seed in pack.seeds])

    graphed = Engine(pack, data, device=device)
    losses = graphed.train(orders)
    with eager():
        plainly_run = Engine(pack, data, device=device)
        eager_losses = plainly_run.train(orders)
    found: dict[str, Any] = {"shape": shape, "same_bits": bool(np.array_equal(losses, eager_losses))}
    found["graphs_from_eager"] = float(np.max(np.abs(eager_losses / losses - 1)))
    contenders: dict[str, tuple[int, Contender]] = {
        "eager": (len(pack.trials), _Eager(plainly_run)),
        "graphs": (len(pack.trials), graphed),
    }
    if is_plain_possible:
        alone = PlainLoop(one, data, device)
        found["from_plain"] = float(abs(alone.train(orders[:1])[0] / losses[0] - 1))
        contenders["plain"] = 1, alone
    calls, works = {}, {}
    for name, (_, contender) in contenders.items():
        mine = orders[: len(one.seeds)] if name == "plain" else orders
        _synchronised(contender, mine, 1)
        started = CLOCKS["wall"]()
        _synchronised(contender, mine, 1)
        calls[name] = max(1, round(options.seconds / (CLOCKS["wall"]() - started)))
        works[name] = partial(_synchronised, contender, mine, calls[name])
    seconds = interleaved(works, options.rounds, CLOCKS["wall"])
    speeds = {name: calls[name] * UNIT * lanes / median(seconds[name]) for name, (lanes, _) in contenders.items()}
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {**found, "speeds": speeds, "seconds": seconds, "memory_bytes": memory}


def row(cell: dict[str, Any]) -> list[str]:
    normaliser, optimiser, width, batch_size, seeds, rates = cell["shape"]
    head = [normaliser, optimiser, str(width), str(batch_size), str(seeds * rates)]
    if "error" in cell:
        return [*head, cell["error"].replace("|", "/"), *["–"] * (len(HEAD) - len(head) - 1)]
    speeds = cell["speeds"]
    plain, graphed = speeds.get("plain"), speeds["graphs"]
    is_right = cell.get("from_plain", 0.0) <= TOLERANCE
    return [
        *(*head, f"{plain:,.0f}" if plain else "–", f"{speeds['eager']:,.0f}", f"{graphed:,.0f}"),
        f"{graphed / speeds['eager']:.1f}",
        f"{graphed / plain:.0f}" if plain and is_right else "–",
        "yes" if cell["same_bits"] else f"no, {cell['graphs_from_eager']:.1e}",
        f"{cell['from_plain']:.1e}" if plain else "–",
    ]


@contextmanager
def eager() -> Iterator[None]:
    """Within: `Captured` runs its function at each call instead of a capture."""
    call = graphs.Captured.__call__
    cast(Any, graphs.Captured).__call__ = lambda self: self._function()
    try:
        yield
    finally:
        cast(Any, graphs.Captured).__call__ = call


class _Eager:
    """A contender whose training runs without captures."""

    def __init__(self, contender: Contender):
        self._contender = contender

    def train(self, orders: np.ndarray) -> np.ndarray:
        with eager():
            return self._contender.train(orders)


def _synchronised(contender: Contender, orders: np.ndarray, calls: int) -> None:
    for _ in range(calls):
        contender.train(orders)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
