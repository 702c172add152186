"""Spec → the ordered trials, their packs, and what they will cost. Pure: same spec, same plan."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trials.records import Pack, TrialConfig
from trials.spec import StudySpec
from trials.spec.catalogue import DataFacts
from trials.spec.issues import Issue, SpecError

MAX_LANES = 64
"""Most trials in one pack: enough to fill one core's vector units, few enough to stay in its cache."""

PACK_BYTES = 2 * 2**30
"""Memory that one pack may take: of large networks fewer train together."""

MAX_TRIAL_BYTES = 8 * 2**30
"""A trial that needs more by itself is refused: on most nodes it would take other studies down with it."""

_FLOPS_PER_SECOND = 8.0e10  # one core of a 2024 server, lanes together
_SECONDS_PER_STEP = 1.2e-4  # Python and dispatch per optimiser step of a pack, whatever its lanes
_SECONDS_PER_PACK = 0.3  # Tune's share and the shard


@dataclass(frozen=True)
class Cost:
    """What a plan asks of the cluster. `core_seconds` is a rough estimate, good to a factor of about 3."""

    samples: int  # training samples over all trials and epochs
    updates: int  # optimiser steps over all trials
    core_seconds: float


@dataclass(frozen=True)
class Plan:
    """Every trial of a study, in packs. The order of packs is the order of the results table."""

    packs: tuple[Pack, ...]
    cells: int
    trials: int
    cost: Cost


def count_trials(spec: StudySpec) -> int:
    """How many trials the spec asks for, without making them: a cap can be checked at once."""
    return math.prod(len(levels) for levels in _axes(spec).values()) * len(spec.seed_list)


def make_plan(spec: StudySpec, facts: DataFacts) -> Plan:
    """Lay out the study.

    Packs are ordered by batch size, then normaliser and the other axes as listed; a pack's
    membership depends on the spec alone, so a resumed study trains the very same packs.

    Raises:
        SpecError: where a batch size exceeds the training split, more training samples are
            asked for than there are, or one trial needs more memory than `MAX_TRIAL_BYTES`.
    """
    if issues := _impossible(spec, facts):
        raise SpecError(issues)
    axes = _axes(spec)
    rates, seeds = axes.pop("learning_rate"), spec.seed_list
    packs: list[Pack] = []
    for levels in itertools.product(*axes.values()):
        shape = dict(zip(axes, levels, strict=True))
        lanes = max(1, min(MAX_LANES, PACK_BYTES // lane_bytes(_sizes(shape, facts), shape["batch_size"])))
        rates_per_pack = min(len(rates), lanes)
        seeds_per_pack = max(1, lanes // rates_per_pack)
        chunks = [
            (some_rates, some_seeds)
            for some_seeds in _chunks(seeds, seeds_per_pack)
            for some_rates in _chunks(rates, rates_per_pack)
        ]
        for index, (some_rates, some_seeds) in enumerate(chunks):
            trials = tuple(_trial(spec, shape, rate, seed) for seed in some_seeds for rate in some_rates)
            label = _label(spec, shape) + (f"-{index + 1}of{len(chunks)}" if len(chunks) > 1 else "")
            packs.append(Pack(_pack_key(trials), label, trials))
    trials = sum(len(pack.trials) for pack in packs)
    cells = trials // len(seeds)
    return Plan(tuple(packs), cells, trials, estimate(packs, facts))


def _axes(spec: StudySpec) -> dict[str, list[Any]]:
    """Every axis but the seed, from the slowest to the fastest in the plan's order."""
    space, model = spec.space, spec.model
    return {
        "batch_size": list(space.batch_size),
        "depth": list(space.depth or [model.depth]),
        "width": list(space.width or [model.width]),
        "activation": list(space.activation or [model.activation]),
        "normaliser": list(space.normaliser),
        "learning_rate": list(space.learning_rate),
    }


def _trial(spec: StudySpec, shape: dict[str, Any], learning_rate: float, seed: int) -> TrialConfig:
    return TrialConfig(
        dataset=spec.data.dataset,
        path=spec.data.path,
        train_samples=spec.data.train_samples,
        validation_fraction=spec.data.validation_fraction,
        test_fraction=spec.data.test_fraction,
        split_seed=spec.data.split_seed,
        model=spec.model.kind,
        depth=shape["depth"],
        width=shape["width"],
        activation=shape["activation"],
        normaliser=shape["normaliser"],
        optimiser=spec.training.optimiser,
        epochs=spec.training.budget.epochs,
        last_batch=spec.training.last_batch,
        batch_size=shape["batch_size"],
        learning_rate=learning_rate,
        seed=seed,
    )


def _label(spec: StudySpec, shape: dict[str, Any]) -> str:
    """`affine_like-B8`, with the other axes where the study varies them: `affine_like-B8-W64`."""
    parts = [shape["normaliser"], f"B{shape['batch_size']}"]
    if spec.space.depth:
        parts.append(f"D{shape['depth']}")
    if spec.space.width:
        parts.append(f"W{shape['width']}")
    if spec.space.activation:
        parts.append(shape["activation"])
    return "-".join(parts)


def _pack_key(trials: Sequence[TrialConfig]) -> str:
    return hashlib.sha256("".join(trial.key for trial in trials).encode()).hexdigest()[:16]


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _impossible(spec: StudySpec, facts: DataFacts) -> list[Issue]:
    issues = []
    if spec.data.train_samples is not None and spec.data.train_samples > facts.train_available:
        issues.append(
            Issue(
                "/data/train_samples",
                f"{spec.data.train_samples} asked for, but the data set has {facts.train_available} training samples",
            )
        )
        return issues
    for index, batch_size in enumerate(spec.space.batch_size):
        if batch_size > facts.train:
            issues.append(
                Issue(
                    f"/space/batch_size/{index}",
                    f"{batch_size} is larger than the {facts.train} samples of the training split "
                    "(what is left after the validation split)",
                )
            )
    for depth in spec.space.depth or [spec.model.depth]:
        for index, width in enumerate(spec.space.width or [spec.model.width]):
            needed = lane_bytes(_sizes({"width": width, "depth": depth}, facts), max(spec.space.batch_size))
            if needed > MAX_TRIAL_BYTES:
                place = f"/space/width/{index}" if spec.space.width else "/model/width"
                detail = f"one trial of width {width} and depth {depth} needs about {needed / 2**30:.0f} GiB of memory"
                issues.append(Issue(place, f"{detail}; at most {MAX_TRIAL_BYTES // 2**30} GiB are allowed"))
    return issues


def lane_bytes(sizes: Sequence[int], batch_size: int) -> int:
    """About the memory that one trial takes while it trains alone, in float32.

    Args:
        sizes: features, widths of the hidden layers, classes.
    """
    weights = sum(a * b for a, b in itertools.pairwise(sizes))
    samples = max(batch_size, 128)  # the engine takes small batches in chunks of up to 128 samples
    return 4 * (3 * weights + samples * (2 * sizes[0] + 6 * sum(sizes[1:])))


def _sizes(shape: Mapping[str, Any], facts: DataFacts) -> list[int]:
    return [facts.features, *[shape["width"]] * shape["depth"], facts.classes]


def estimate(packs: Sequence[Pack], facts: DataFacts) -> Cost:
    """What these packs cost; of a whole plan it is `Plan.cost`."""
    samples = updates = 0
    seconds = 0.0
    for pack in packs:
        config, lanes = pack.config, len(pack.trials)
        steps = facts.train // config.batch_size * config.epochs
        updates += steps * lanes
        samples += steps * lanes * config.batch_size
        sizes = _sizes({"width": config.width, "depth": config.depth}, facts)
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        training = 6 * weights * steps * config.batch_size * lanes
        evaluation = 2 * weights * (facts.validation + facts.test) * config.epochs * lanes
        seconds += steps * _SECONDS_PER_STEP + (training + evaluation) / _FLOPS_PER_SECOND + _SECONDS_PER_PACK
    return Cost(samples, updates, round(seconds, 1))
