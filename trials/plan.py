"""Spec → the ordered trials, their packs, and what they will cost. Pure: same spec, same plan."""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trials.records import Pack, TrialConfig, channels_text
from trials.sizes import sizes_of
from trials.spec import StudySpec
from trials.spec.catalogue import DataFacts
from trials.spec.issues import Issue, SpecError
from trials.spec.models import SyntheticSpec

MAX_LANES = 64
"""Most trials in one pack: enough to fill one core's vector units, few enough to stay in its cache."""

PACK_BYTES = 2 * 2**30
"""Memory that one pack may take: of large networks fewer train together."""

MAX_TRIAL_BYTES = 8 * 2**30
"""A trial that needs more by itself is refused: on most nodes it would take other studies down with it."""

_FLOPS_PER_SECOND = 8.0e10  # one core of a 2024 server, lanes together
_CONVOLUTION_FLOPS_PER_SECOND = 3.0e10  # grouped convolutions of few channels, as measured on `patchnorm-small`
_SECONDS_PER_STEP = 1.2e-4  # Python and dispatch per optimiser step of a pack, whatever its lanes
_SECONDS_PER_MAP = 2.0e-4  # the same, per affine map, of what autograd and the optimiser add on the general path
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
    return math.prod(len(levels) for levels in spec.axes().values()) * len(spec.seed_list)


def make_plan(spec: StudySpec, facts: DataFacts) -> Plan:
    """Lay out the study.

    Packs are ordered by batch size, then normaliser and the other axes as listed; a pack's
    membership depends on the spec alone, so a resumed study trains the very same packs.

    Raises:
        SpecError: where a batch size exceeds the training split, more training samples are
            asked for than there are, the budget is less than one step, samples do not fit the
            network, or one trial needs more memory than `MAX_TRIAL_BYTES`.
    """
    if issues := _impossible(spec, facts):
        raise SpecError(issues)
    axes = spec.axes()
    settings = list(itertools.product(axes.pop("weight_decay"), axes.pop("learning_rate")))
    seeds = spec.seed_list
    packs: list[Pack] = []
    for levels in itertools.product(*axes.values()):
        shape = dict(zip(axes, levels, strict=True))
        first = _trial(spec, shape, *settings[0], seeds[0])
        lanes = max(1, min(MAX_LANES, PACK_BYTES // lane_bytes(first, facts)))
        settings_per_pack = min(len(settings), lanes)
        seeds_per_pack = max(1, lanes // settings_per_pack)
        chunks = [
            (some_settings, some_seeds)
            for some_seeds in _chunks(seeds, seeds_per_pack)
            for some_settings in _chunks(settings, settings_per_pack)
        ]
        for index, (some_settings, some_seeds) in enumerate(chunks):
            trials = tuple(
                _trial(spec, shape, decay, rate, seed) for seed in some_seeds for decay, rate in some_settings
            )
            label = _label(spec, shape) + (f"-{index + 1}of{len(chunks)}" if len(chunks) > 1 else "")
            packs.append(Pack(_pack_key(trials), label, trials))
    trials = sum(len(pack.trials) for pack in packs)
    cells = trials // len(seeds)
    return Plan(tuple(packs), cells, trials, estimate(packs, facts))


def _trial(spec: StudySpec, shape: dict[str, Any], weight_decay: float, learning_rate: float, seed: int) -> TrialConfig:
    data, model, training, probes = spec.data, spec.model, spec.training, spec.probes
    budget, schedule = training.budget, training.schedule
    is_cnn, is_attention = model.kind == "cnn", model.kind == "attention"
    channels = tuple(shape["channels"]) if is_cnn else None
    synthetic = None
    if data.dataset == "synthetic":
        content = (data.synthetic or SyntheticSpec()).model_dump(mode="json")
        synthetic = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return TrialConfig(
        dataset=data.dataset,
        path=data.path,
        train_samples=data.train_samples,
        validation_fraction=data.validation_fraction,
        test_fraction=data.test_fraction,
        split_seed=data.split_seed,
        model=model.kind,
        depth=len(channels) if channels else shape["depth"],
        width=max(channels) if channels else shape["width"],
        activation=shape["activation"],
        normaliser=shape["normaliser"],
        optimiser=shape["optimiser"],
        epochs=budget.epochs,
        last_batch=training.last_batch,
        batch_size=shape["batch_size"],
        learning_rate=learning_rate,
        seed=seed,
        budget_updates=budget.updates,
        budget_samples=budget.samples,
        placement=shape["placement"],
        gain=shape["gain"],
        channels=channels,
        kernel=shape["kernel"] if is_cnn else None,
        stride=shape["stride"] if is_cnn else None,
        pooling=shape["pooling"] if is_cnn else None,
        heads=model.heads if is_attention else None,
        patch=model.patch if is_attention else None,
        momentum=training.momentum if shape["optimiser"] == "momentum" else None,
        weight_decay=weight_decay,
        schedule=schedule.kind,
        schedule_final=schedule.final if schedule.kind == "cosine" else None,
        schedule_every=schedule.every if schedule.kind == "step" else None,
        schedule_factor=schedule.factor if schedule.kind == "step" else None,
        scaling=training.scaling,
        scaling_batch_size=None if training.scaling == "none" else training.scaling_batch_size,
        synthetic=synthetic,
        probe_every=probes.every if probes else None,
        probe_samples=probes.samples if probes else None,
    )


def _label(spec: StudySpec, shape: dict[str, Any]) -> str:
    """`affine_like-B8`, with the other axes where the study varies them: `affine_like-B8-W64`."""
    parts = [shape["normaliser"], f"B{shape['batch_size']}"]
    for axis, text in _LABELS.items():
        if getattr(spec.space, axis):
            parts.append(text(shape[axis]))
    return "-".join(parts)


_LABELS: dict[str, Callable[[Any], str]] = {
    "depth": "D{}".format,
    "width": "W{}".format,
    "activation": str,
    "placement": str,
    "gain": lambda gain: "gain" if gain else "nogain",
    "channels": lambda channels: f"C{channels_text(channels)}",
    "kernel": "K{}".format,
    "stride": "S{}".format,
    "pooling": "pool_{}".format,
    "optimiser": str,
}


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
    most, budget = max(spec.space.batch_size), spec.training.budget.samples
    if budget is not None and budget < most:
        issues.append(
            Issue(
                "/training/budget", f"{budget} samples are less than one batch of {most}; give at least {most} samples"
            )
        )
    return [*issues, *_networks_that_do_not_fit(spec, facts)]


def _networks_that_do_not_fit(spec: StudySpec, facts: DataFacts) -> list[Issue]:
    """Of the networks of the design: those that the samples are too small for, and those too large for a node."""
    axes = spec.axes()
    names = ("depth", "width", "channels", "kernel", "stride", "pooling")
    largest = {name: levels[0] for name, levels in axes.items()}
    largest["batch_size"] = max(axes["batch_size"])
    largest["optimiser"] = max(axes["optimiser"], key=_STATES.__getitem__)
    found: dict[str, Issue] = {}
    for levels in itertools.product(*(enumerate(axes[name]) for name in names)):
        indices = {name: index for name, (index, _) in zip(names, levels, strict=True)}
        shape = largest | {name: level for name, (_, level) in zip(names, levels, strict=True)}
        trial = _trial(spec, shape, 0.0, 1.0, 0)
        try:
            needed = lane_bytes(trial, facts)
        except ValueError as error:
            name = "patch" if trial.model == "attention" else "channels"
            advice = "a side that does" if trial.model == "attention" else "fewer layers, or pooling: none"
            detail = f"{error}; choose {advice}"
        else:
            if needed <= MAX_TRIAL_BYTES:
                continue
            name = "channels" if trial.channels else "width"
            size = f"width {trial.width} and depth {trial.depth}"
            if trial.channels:
                size = f"channels {channels_text(trial.channels)}"
            detail = (
                f"one trial of {size} needs about {needed / 2**30:.0f} GiB of memory; at most "
                f"{MAX_TRIAL_BYTES // 2**30} GiB are allowed"
            )
        is_axis = getattr(spec.space, name, None) is not None
        place = f"/space/{name}/{indices[name]}" if is_axis else f"/model/{name}"
        found.setdefault(place, Issue(place, detail))
    return list(found.values())


def lane_bytes(config: TrialConfig, facts: DataFacts) -> int:
    """About the memory that one trial takes while it trains alone, in float32.

    Raises:
        ValueError: the data set's samples do not fit the trial's network.
    """
    sizes = sizes_of(config, facts.shape, facts.classes)
    samples = max(config.batch_size, 128)  # the engine takes small batches in chunks of up to 128 samples
    copies = 3 + _STATES[config.optimiser]
    return 4 * (copies * sizes.weights + samples * (2 * facts.features + 6 * sizes.activations))


_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Values that an optimiser keeps per parameter."""


def estimate(packs: Sequence[Pack], facts: DataFacts) -> Cost:
    """What these packs cost; of a whole plan it is `Plan.cost`."""
    samples = updates = 0
    seconds = 0.0
    for pack in packs:
        config, lanes = pack.config, len(pack.trials)
        steps = config.updates(facts.train)
        updates += steps * lanes
        samples += steps * lanes * config.batch_size
        epochs = math.ceil(steps / (facts.train // config.batch_size))
        sizes = sizes_of(config, facts.shape, facts.classes)
        training = 2 * sizes.training * steps * config.batch_size * lanes
        evaluation = 2 * sizes.evaluation * (facts.validation + facts.test) * epochs * lanes
        per_step = _SECONDS_PER_STEP + (0.0 if _is_plain(config) else _SECONDS_PER_MAP * sizes.maps)
        speed = _CONVOLUTION_FLOPS_PER_SECOND if config.model == "cnn" else _FLOPS_PER_SECOND
        seconds += steps * per_step + (training + evaluation) / speed + _SECONDS_PER_PACK
    return Cost(samples, updates, round(seconds, 1))


def _is_plain(config: TrialConfig) -> bool:
    """Whether the engine's fast path trains it; see `trials.engine.fused`."""
    extras = config.optimiser != "sgd" or config.weight_decay or config.placement != "pre" or config.gain
    return config.model == "mlp" and not extras
