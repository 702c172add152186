"""Results tables with a known truth, and the measurements of the analysis' error rates.

python -m tests.analysis.simulate       # coverage and false-positive rates, a few minutes
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from analysis import analyse
from analysis.resampling import bootstrap
from trials.records import METRICS, Reason, TrialConfig, TrialResult, TrialState
from trials.spec import StudySpec, parse_spec
from trials.table import results_table

Truth = Callable[[TrialConfig], float]


def make_spec(
    arms: Sequence[str] = ("norm_like",),
    batch_sizes: Sequence[int] = (4, 8, 16, 32, 64, 128),
    learning_rates: Sequence[float] = (0.01, 0.03, 0.1, 0.3),
    seeds: int | list[int] = 5,
    hypotheses: Sequence[dict] = (),
    **more: object,
) -> StudySpec:
    return parse_spec(
        {
            "version": 1,
            "name": "simulated study",
            "data": {"dataset": "digits"},
            "model": {},
            "training": {"budget": {"epochs": 10}},
            "space": {
                "normaliser": list(arms),
                "batch_size": list(batch_sizes),
                "learning_rate": list(learning_rates),
                **({"width": more.pop("width")} if "width" in more else {}),
            },
            "seeds": seeds,
            "hypotheses": list(hypotheses),
            **more,
        }
    )


def configs(spec: StudySpec) -> list[TrialConfig]:
    base = {
        "dataset": "digits",
        "path": None,
        "train_samples": None,
        "validation_fraction": 0.15,
        "test_fraction": 0.2,
        "split_seed": 0,
        "model": "mlp",
        "optimiser": "sgd",
        "epochs": spec.training.budget.epochs,
        "last_batch": "drop",
    }
    return [
        TrialConfig(
            **base,
            depth=depth,
            width=width,
            activation=activation,
            normaliser=arm,
            batch_size=batch_size,
            learning_rate=rate,
            seed=seed,
        )
        for batch_size in spec.space.batch_size
        for depth in spec.space.depth or [spec.model.depth]
        for width in spec.space.width or [spec.model.width]
        for activation in spec.space.activation or [spec.model.activation]
        for arm in spec.space.normaliser
        for seed in spec.seed_list
        for rate in spec.space.learning_rate
    ]


def make_results(
    spec: StudySpec,
    truth: Truth,
    rng: np.random.Generator,
    noise: float = 0.005,
    seed_level: float = 0.01,
    seed_slope: float = 0.0,
    shared: float = 0.0,
) -> list[TrialResult]:
    """Trials whose accuracy is truth + seed effect + seed's own slope + noise shared by a seed's rates + noise."""
    levels = dict(zip(spec.seed_list, rng.normal(0, 1, len(spec.seed_list)), strict=True))
    slopes: dict[tuple[str, int], float] = {}
    common: dict[tuple[str, int, int], float] = {}
    results = []
    for config in configs(spec):
        doublings = math.log2(config.batch_size / 16)
        slope = slopes.setdefault((config.normaliser, config.seed), float(rng.normal()))
        place = (config.normaliser, config.seed, config.batch_size)
        value = truth(config) + seed_level * levels[config.seed] + seed_slope * slope * doublings
        value += shared * common.setdefault(place, float(rng.normal())) + noise * float(rng.normal())
        results.append(succeeded(config, float(np.clip(value, 0, 1))))
    return results


def succeeded(config: TrialConfig, accuracy: float | None, validation: float = 0.5) -> TrialResult:
    last = {"test_accuracy": accuracy, "validation_accuracy": validation}
    curves = {metric: (0.5, last.get(metric, 0.5)) for metric in METRICS}
    return TrialResult(config, TrialState.SUCCEEDED, None, config.epochs or 0, 100, 1000, 0.1, curves)


def diverged(result: TrialResult) -> TrialResult:
    return replace(
        result,
        state=TrialState.DIVERGED,
        reason=Reason.NON_FINITE_LOSS,
        epochs_completed=1,
        curves=dict.fromkeys(METRICS, (None,)),
    )


def absent(
    result: TrialResult, state: TrialState = TrialState.LOST, reason: Reason = Reason.WORKER_LOST
) -> TrialResult:
    return TrialResult.absent(result.config, state, reason)


def as_table(results: Sequence[TrialResult]) -> pa.Table:
    return results_table(["0" * 16] * len(results), results)


def line(slope: float, start: float = 0.8) -> Truth:
    """The same slope per doubling for every arm, learning rate and seed."""
    return lambda config: start + slope * math.log2(config.batch_size / 16)


def simulated(spec: StudySpec, truth: Truth, seed: int = 0, **noise: float) -> pa.Table:
    return as_table(make_results(spec, truth, np.random.default_rng(seed), **noise))


def coverage(
    n_seeds: int, samples: int, rng: np.random.Generator, resamples: int = 1999, alpha: float = 0.05
) -> tuple[float, float]:
    """Shares of samples of normal values whose true mean lies in (our interval, the plain percentile interval)."""
    ours = plain = done = 0
    while done < samples:
        values = rng.normal(size=(n_seeds, min(500, samples - done)))
        resampled = bootstrap(values, rng, resamples)
        low, high = np.quantile(resampled.draws, [alpha / 2, 1 - alpha / 2], axis=0)
        plain += int(((low <= 0) & (high >= 0)).sum())
        for column in range(values.shape[1]):
            interval = resampled.interval(column, alpha)
            ours += interval is not None and interval[0] <= 0 <= interval[1]
        done += values.shape[1]
    return ours / samples, plain / samples


NULL_HYPOTHESIS = {"kind": "batch_size_slope", "direction": "negative", "smallest_slope": 1e-6}
"""With so small a slope of interest no verdict is "flat", which could hide a false positive."""


def false_positives(
    studies: int, rng: np.random.Generator, arms: int = 3, /, *, seeds: int = 5, resamples: int = 499, **noise: Any
) -> tuple[float, float, float]:
    """Over null studies, shares with (any arm decided negative or positive, any Holm-adjusted p ≤ 0.05, a
    hypothesis answered supported or contradicted).
    """
    names = ["none", "batch_norm", "layer_norm", "rms_norm", "norm_like", "affine_like"][:arms]
    decided = rejected = answered = 0
    for _ in range(studies):
        spec = make_spec(
            arms=names,
            learning_rates=(0.03, 0.1),
            batch_sizes=(8, 16, 32, 64),
            seeds=[int(s) for s in rng.choice(2**31 - 1, seeds, replace=False)],  # new seeds: new draws in the analysis
            hypotheses=[NULL_HYPOTHESIS | {"arms": names}],
        )
        analysis = analyse(null_table(spec, rng, **noise), spec, resamples=resamples)
        found = analysis.arms
        decided += any(arm.verdict in ("negative", "positive") for arm in found)
        rejected += any(arm.p_holm is not None and arm.p_holm <= 0.05 for arm in found)
        answered += any(hypothesis.verdict != "undecided" for hypothesis in analysis.hypotheses)
    return decided / studies, rejected / studies, answered / studies


def withheld(studies: int, rng: np.random.Generator, resamples: int = 499) -> float:
    """Share of studies that call an arm mixed whose accuracy rises at two learning rates and stays at two."""
    mixed = 0
    for _ in range(studies):
        spec = make_spec(
            batch_sizes=(8, 16, 32, 64),
            seeds=[int(s) for s in rng.choice(2**31 - 1, 5, replace=False)],
            hypotheses=[NULL_HYPOTHESIS | {"arms": ["norm_like"]}],
        )
        table = null_table(spec, rng, rate_slopes=(0, 0, 0.02, 0.02))
        mixed += analyse(table, spec, resamples=resamples).arms[0].mixed_over_learning_rates
    return mixed / studies


def null_table(
    spec: StudySpec,
    rng: np.random.Generator,
    noise: float = 0.005,
    seed_slope: float = 0.0,
    shared: float = 0.0,
    rate_slopes: Sequence[float] = (0.0,),
) -> pa.Table:
    """Like `simulated` with a slope of zero, with only the columns the analysis reads: made in a millisecond.

    Args:
        rate_slopes: true slope within each learning rate; with mean zero the combined slope is null.
    """
    space = spec.space
    shape = (len(space.normaliser), len(spec.seed_list), len(space.batch_size), len(space.learning_rate))
    doublings = np.log2(space.batch_size) - np.log2(space.batch_size).mean()
    accuracy = 0.8 + 0.01 * rng.normal(size=(1, shape[1], 1, 1)) + noise * rng.normal(size=shape)
    accuracy += seed_slope * rng.normal(size=(*shape[:2], 1, 1)) * doublings[None, None, :, None]
    accuracy += np.asarray(rate_slopes) * doublings[:, None]
    accuracy += shared * rng.normal(size=(*shape[:3], 1))
    arm, seed, batch, rate = (index.ravel() for index in np.indices(shape))
    n = accuracy.size
    return pa.table(
        {
            "trial_key": [str(i) for i in range(n)],
            "normaliser": [space.normaliser[i] for i in arm],
            "seed": [spec.seed_list[i] for i in seed],
            "batch_size": [space.batch_size[i] for i in batch],
            "learning_rate": [space.learning_rate[i] for i in rate],
            "width": [32] * n,
            "depth": [1] * n,
            "activation": ["tanh"] * n,
            "state": ["succeeded"] * n,
            "reason": pa.nulls(n, pa.string()),
            "chance_accuracy": [0.1] * n,
            "test_accuracy": accuracy.ravel(),
        }
    )


def main() -> None:
    rng = np.random.default_rng(20261201)
    for n_seeds in (2, 3, 4, 5, 10, 20):
        ours, plain = coverage(n_seeds, 20_000, rng)
        print(f"coverage of 95% intervals, {n_seeds} seeds, normal: ours {ours:.4f}, plain percentile {plain:.4f}")
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (3, {}),
        (1, {"shared": 0.01}),
        (3, {"shared": 0.01}),
        (1, {"seed_slope": 0.005}),
        (3, {"seed_slope": 0.005}),
    ]
    for arms, noise in cases:
        decided, rejected, _ = false_positives(2000, rng, arms, **noise)
        print(
            f"2000 null studies, {arms} arms, {noise or 'plain noise'}: "
            f"verdict {decided:.4f}, Holm's permutation p alone {rejected:.4f}"
        )
    rng = np.random.default_rng(20261202)
    decided, _, answered = false_positives(2000, rng, 1, rate_slopes=(-0.02, 0.02))
    print(f"2000 studies, slopes opposed between learning rates: arm decided {decided:.4f}, claim {answered:.4f}")
    print(f"2000 studies, slope at half of 4 learning rates: called mixed {withheld(2000, rng):.4f}")


if __name__ == "__main__":
    main()
