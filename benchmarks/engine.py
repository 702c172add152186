"""The engine against a strong plain PyTorch loop: training throughput of one core, in samples × lanes per second.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--lanes 8,16,32,64] [--json engine.json]

Both train an MLP 3072 → W → 10 (tanh, plain SGD, normaliser `none`) on the same synthetic data,
resident in memory, for the same number of epochs, without evaluation. The plain loop is one
`nn.Sequential` with `torch.optim.SGD`, batches taken by index, no DataLoader: what a careful
user would write for one trial at a time. Rounds alternate between the two and the lane counts,
so that a slow minute of the machine hits all alike; the figures are medians over rounds.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trials.engine import Dataset, PackRun, Split
from trials.engine.train import EpochTrainer
from trials.records import Pack, TrialConfig

FEATURES, CLASSES, SAMPLES = 3072, 10, 2048
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
WIDTHS, BATCH_SIZES = (16, 64), (8, 32, 128)


def dataset() -> Dataset:
    generator = np.random.default_rng(0)

    def split(count: int) -> Split:
        return Split(
            generator.standard_normal((count, FEATURES), dtype=np.float32),
            generator.integers(0, CLASSES, count),
        )

    return Dataset(split(SAMPLES), split(16), split(16), CLASSES, "synthetic", (3, 32, 32))


def pack(width: int, batch_size: int, seeds: int, rates: int, normaliser: str) -> Pack:
    trials = tuple(
        TrialConfig(
            dataset="digits",
            path=None,
            train_samples=None,
            validation_fraction=0.15,
            test_fraction=0.2,
            split_seed=0,
            model="mlp",
            depth=1,
            width=width,
            activation="tanh",
            normaliser=normaliser,
            optimiser="sgd",
            epochs=1_000_000,
            last_batch="drop",
            batch_size=batch_size,
            learning_rate=0.001 * (1 + rate),
            seed=seed,
        )
        for seed in range(seeds)
        for rate in range(rates)
    )
    return Pack("benchmark", f"{seeds}x{rates}", trials)


def plain_epoch(data: Dataset, width: int, batch_size: int, device: str) -> Callable[[int], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.001)
    inputs = torch.from_numpy(data.train.inputs).to(device)
    labels = torch.from_numpy(data.train.labels).to(device)

    def run(epoch: int) -> None:
        order = torch.from_numpy(np.random.default_rng([0, epoch]).permutation(SAMPLES)).to(device)
        for rows in order.split(batch_size):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        _wait(device)

    return run


def engine_epoch(trainer: EpochTrainer, device: str) -> Callable[[int], None]:
    def run(epoch: int) -> None:
        with torch.inference_mode():
            trainer.train_epoch(epoch)
        _wait(device)

    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    runs: dict[str, tuple[int, Callable[[int], None]]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median samples × lanes per second of each run; the first round of each warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for epoch in range(rounds + 1):
        for name, (_, run) in runs.items():
            start = clock()
            run(epoch)
            times[name].append(clock() - start)
    return {name: SAMPLES * lanes / statistics.median(times[name][1:]) for name, (lanes, _) in runs.items()}


def layouts(lanes: int) -> list[tuple[int, int]]:
    """(seeds, learning rates) of a lane count: all lanes on one seed, and four learning rates per seed."""
    return list(dict.fromkeys([(1, lanes), (max(1, lanes // 4), min(lanes, 4))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="8,16,32,64", help="lane counts to try; the table shows the best")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of one epoch each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: where other processes want the core too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--normaliser", default="none")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lane_counts = [int(text) for text in options.lanes.split(",")]
    data = dataset()
    cells: list[dict[str, Any]] = []
    print("| W | B | plain loop /s | 1 lane: ratio | best of S seeds × 4: /s | ratio | best of 1 seed: /s | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for width in WIDTHS:
        for batch_size in BATCH_SIZES:
            runs = {"plain": (1, plain_epoch(data, width, batch_size, options.device))}
            grids = dict.fromkeys([(1, 1), *(grid for lanes in lane_counts for grid in layouts(lanes))])
            for seeds, rates in grids:
                the_pack = pack(width, batch_size, seeds, rates, options.normaliser)
                (trainer,) = PackRun(the_pack, data, options.device).trainers
                runs[f"{seeds}x{rates}"] = (seeds * rates, engine_epoch(trainer, options.device))
            speeds = measure(runs, options.rounds, CLOCKS[options.clock])
            cells.append({"width": width, "batch_size": batch_size, "samples_per_second": speeds})
            plain = speeds["plain"]
            mixed = max((f"{s}x{r}" for s, r in grids if s > 1 or s * r == 1), key=speeds.__getitem__)
            single = max((f"{s}x{r}" for s, r in grids if s == 1), key=speeds.__getitem__)
            row = [
                *(width, batch_size, f"{plain:,.0f}", f"{speeds['1x1'] / plain:.2f}"),
                *(f"{mixed}: {speeds[mixed]:,.0f}", f"{speeds[mixed] / plain:.1f}"),
                *(f"{single}: {speeds[single]:,.0f}", f"{speeds[single] / plain:.1f}"),
            ]
            print("|", " | ".join(map(str, row)), "|", flush=True)
    about = {
        "rounds": options.rounds,
        "warm_up_rounds": 1,
        "clock": options.clock,
        "samples_per_round": SAMPLES,
        "features": FEATURES,
        "normaliser": options.normaliser,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    print(f"\n{about}")
    if options.json:
        options.json.write_text(json.dumps({**about, "cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
