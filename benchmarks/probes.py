"""What probes cost, as a share of the training they look at.

    OMP_NUM_THREADS=1 python -m benchmarks.probes [--rounds 3]

CPU time of this process for `every` epochs of training with one probe among them against the same
without, in turns, on CIFAR-shaped input; medians over rounds.
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from trials.engine import Dataset, PackRun, Split
from trials.records import Pack, TrialConfig

EVERY, SAMPLES, TRAIN, FEATURES = 5, 256, 10_000, 3072
SHAPES = [("none", 4), ("none", 8), ("affine_like", 32), ("batch_norm", 128)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dataset = _dataset()
    print(f"a probe of {SAMPLES} samples every {EVERY} epochs of {TRAIN}, W = 32, 20 lanes, {rounds} rounds")
    for normaliser, batch_size in SHAPES:
        pack = _pack(normaliser, batch_size)
        runs = [PackRun(pack, dataset), PackRun(_probed(pack), dataset)]
        for run in runs:
            run.step()  # warm-up; the probed run's first probe is in it
        plain, probed = [], []
        for _ in range(rounds):
            plain.append(sum(_seconds(runs[0]) for _ in range(EVERY)))
            probed.append(sum(_seconds(runs[1]) for _ in range(EVERY)))  # one probe falls into any five epochs
        share = statistics.median(probed) / statistics.median(plain) - 1
        print(f"{normaliser:12} B = {batch_size:<4} {statistics.median(plain):6.2f} s, with a probe {share:+.1%}")


def _seconds(run: PackRun) -> float:
    started = time.process_time()
    run.step()
    return time.process_time() - started


def _dataset() -> Dataset:
    generator = np.random.default_rng(0)

    def split(count: int) -> Split:
        inputs = generator.standard_normal((count, FEATURES), np.float32)
        return Split(inputs, generator.integers(0, 10, count))

    return Dataset(split(TRAIN), split(1000), split(1000), 10, "random", (3, 32, 32))


def _pack(normaliser: str, batch_size: int) -> Pack:
    trials = tuple(
        TrialConfig(
            dataset="parquet",
            path=None,
            train_samples=None,
            validation_fraction=0.1,
            test_fraction=0.1,
            split_seed=0,
            model="mlp",
            depth=1,
            width=32,
            activation="tanh",
            normaliser=normaliser,
            optimiser="sgd",
            epochs=1000,
            last_batch="drop",
            batch_size=batch_size,
            learning_rate=rate,
            seed=seed,
        )
        for seed in range(5)
        for rate in (0.0001, 0.0003, 0.001, 0.003)
    )
    return Pack("0" * 16, "benchmark", trials)


def _probed(pack: Pack) -> Pack:
    return replace(pack, trials=tuple(replace(t, probe_every=EVERY, probe_samples=SAMPLES) for t in pack.trials))


if __name__ == "__main__":
    main()
