"""What the benchmarks share: data, packs, interleaved rounds, the core's own peak, and what a run was measured with."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trials.engine import Dataset, Split
from trials.records import Pack, TrialConfig

FEATURES, CLASSES, SHAPE = 3072, 10, (3, 32, 32)  # CIFAR's
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Work = Callable[[], object]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def one_core() -> int | None:
    """Keep this process, and every thread it will have, on one core; None where the system cannot.

    Call before libraries make their threads: a thread starts where its maker may run.
    """
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def random_dataset(samples: int, held_out: int = 16) -> Dataset:
    """Standard normal inputs of CIFAR's shape with random labels: speed does not depend on the values."""
    generator = np.random.default_rng(0)

    def split(count: int) -> Split:
        inputs = generator.standard_normal((count, FEATURES), dtype=np.float32)
        return Split(inputs, generator.integers(0, CLASSES, count))

    return Dataset(split(samples), split(held_out), split(held_out), CLASSES, "random", SHAPE)


def grid_pack(seeds: int, rates: int, epochs: int, **changes: Any) -> Pack:
    """Seeds × learning rates of one small MLP; `changes` go to the trials' configuration."""
    content: dict[str, Any] = {
        "dataset": "parquet",
        "path": None,
        "train_samples": None,
        "validation_fraction": 0.1,
        "test_fraction": 0.1,
        "split_seed": 0,
        "model": "mlp",
        "depth": 1,
        "width": 16,
        "activation": "tanh",
        "normaliser": "none",
        "optimiser": "sgd",
        "epochs": epochs,
        "last_batch": "drop",
        "batch_size": 8,
        **changes,
    }
    trials = tuple(
        TrialConfig(**content, learning_rate=0.001 * (1 + rate), seed=seed)
        for seed in range(seeds)
        for rate in range(rates)
    )
    return Pack("0" * 16, f"{seeds}x{rates}", trials)


def interleaved(works: Mapping[str, Work], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each work in each round.

    Every round has each work once, so that a slow minute of the machine hits all alike; every other
    round goes backwards, so that none always follows the same one. Warm up before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            started = clock()
            works[name]()
            seconds[name].append(clock() - started)
    return seconds


def gemm_works(seconds: float) -> dict[str, tuple[float, Work]]:
    """float32 matrix products, by library and shape: (floating-point operations of one call, the call).

    A call takes about `seconds`. The shapes are a large cube and two like the first map's products.
    `mm` is what PyTorch's products go through; `onednn` is the library of PyTorch's convolutions, which on
    some processors is faster. The best of all is the core's peak.
    """
    works: dict[str, tuple[float, Work]] = {}
    for m, k, n in ((1024, 1024, 1024), (512, 3072, 512), (256, 3072, 2048)):
        a, b, out = torch.randn(m, k), torch.randn(n, k), torch.empty(m, n)
        products: dict[str, Work] = {"mm": partial(torch.mm, a, b.T, out=out)}
        if torch.backends.mkldnn.is_available():
            products["onednn"] = partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], "")
        operations = 2.0 * m * k * n
        calls = max(1, round(seconds * 100e9 / operations))  # 100 GFLOP/s: of the right order is enough here
        for library, product in products.items():
            product()
            works[f"{library} {m}x{k}x{n}"] = operations * calls, partial(_repeat, product, calls)
    return works


def _repeat(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def flops_per_sample(width: int) -> float:
    """Arithmetic of one lane's training on one sample, F = 6P − 2P₁: the first map needs no gradient of its inputs."""
    first, last = FEATURES * width, width * CLASSES
    return 6.0 * (first + last) - 2.0 * first


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def about(**more: Any) -> dict[str, Any]:
    """Of the machine and the versions a figure was measured with."""
    names = ("torch", "numpy", "jax", "ray", "mlflow")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name))},
        **more,
    }


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
