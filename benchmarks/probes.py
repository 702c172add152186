"""What probes cost, as a share of the training they look at.

    OMP_NUM_THREADS=1 python -m benchmarks.probes [--rounds 3]

CPU time of this process for one probe of all lanes, against that of `EVERY` epochs of training (with their
evaluations), in turns, on CIFAR-shaped input; medians over rounds, and the range of the rounds' own shares.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from trials.engine import Dataset, PackRun, Split
from trials.engine.lanes import Lanes
from trials.engine.networks import make_network
from trials.engine.probes import probe
from trials.records import Pack, TrialConfig

EVERY, SAMPLES, TRAIN, FEATURES, CLASSES = 5, 256, 10_000, 3072, 10
SHAPES = [("none", 4), ("none", 8), ("affine_like", 32), ("batch_norm", 128)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dataset = _dataset()
    print(f"a probe of {SAMPLES} samples every {EVERY} epochs of {TRAIN}, W = 32, 20 lanes, {rounds} rounds")
    for normaliser, batch_size in SHAPES:
        pack = _pack(normaliser, batch_size)
        run = PackRun(pack, dataset)
        probing = _probing(run, dataset)
        run.step()
        probing()  # warm-up
        epochs, probes = [], []
        for _ in range(rounds):
            probes.append(_seconds(probing))
            epochs.append(EVERY * statistics.mean(_seconds(run.step) for _ in range(2)))
        shares = [one / other for one, other in zip(probes, epochs, strict=True)]
        print(
            f"{normaliser:12} B = {batch_size:<4} {EVERY} epochs {statistics.median(epochs):6.2f} s, "
            f"a probe {statistics.median(probes) * 1000:4.0f} ms: {statistics.median(shares):.1%} "
            f"({min(shares):.1%} to {max(shares):.1%})"
        )


def _probing(run: PackRun, dataset: Dataset) -> Callable[[], object]:
    """A probe of what the run's lanes now are, as the run itself would take it."""
    config = replace(run.pack.config, probe_every=EVERY, probe_samples=SAMPLES)  # the timed run itself has none
    network = make_network(config, dataset.shape, dataset.classes)
    ((_, trainer),) = run.blocks
    sizes = torch.tensor([trial.step_size for trial in run.pack.trials], dtype=torch.float64)
    sizes = sizes.view(len(run.pack.seeds), -1)
    lanes = Lanes(run.pack.seeds, sizes, torch.zeros_like(sizes))
    train = torch.from_numpy(dataset.train.inputs), torch.from_numpy(dataset.train.labels)

    def probing() -> None:
        values = probe(network, config, lanes, trainer.state(), train, run.epoch * run.steps, run.updates)
        assert all(value.shape == (trainer.lanes, 2) for value in values.values())

    return probing


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _dataset() -> Dataset:
    generator = np.random.default_rng(0)

    def split(count: int) -> Split:
        inputs = generator.standard_normal((count, FEATURES), np.float32)
        return Split(inputs, generator.integers(0, CLASSES, count))

    return Dataset(split(TRAIN), split(1000), split(1000), CLASSES, "random", (3, 32, 32))


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


if __name__ == "__main__":
    main()
