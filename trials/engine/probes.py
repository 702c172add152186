"""Probes: what an optimiser step does to activations, beside what it ought to do (arXiv 2512.22247).

For an affine map z = W u + b with input x (u is what its normaliser makes of x), a batch of B
samples and G = d(mean loss)/dz, one row per sample (of convolutions per patch, of attention per
token), gradient descent with step size η changes the outputs by

    Δz_i = −η Σ_j w_j G_j (u_j·u_i + c_j c_i)

where c is what multiplies the bias (1; for affine_like and patch_norm_affine 1/sqrt(‖x‖² + 1)) and w
is 1, for gradient_only 1/(‖x‖² + 1). A gain γ per output multiplies u_j·u_i by γ² (and, where it scales
the bias, c_j c_i); one per input is in u. The ideal is −η G_i. Everything is layer by layer: what a step
changes in the maps before is not counted. A probe measures, of each map of each lane, over its rows:

    divergence_mean, divergence_sd   of ‖x‖² + 1, the affine divergence
    alignment       cosine of Δz and −G, all rows together; Δz by the trial's own optimiser, weight
                    decay and schedule included, from the state it is in (W and b; not gains)
    update_gain     ⟨Δz, −G⟩ / (η ‖G‖²): 1 is ideal, for a single sample and SGD it is w (‖u‖² + c²)
    interference    Σ‖others_i‖² / Σ(‖own_i‖² + ‖others_i‖²): the terms j ≠ i of the sum above against
                    j = i. It is of the gradient, whatever the optimiser; 0 for a batch of one. None where
                    a sample has several rows (patches, tokens): those are not other samples
    input_norm_mean, input_norm_sd   of ‖u‖
    input_directions                 (tr M)²/tr(M²), M = Σ u uᵀ / rows

Each is the mean over a few fixed batches of the training split, the same for every trial of a study,
of the trial's own batch size. A batch whose G is all zero (every unit dead or saturated) says nothing of
alignment, update gain and interference and is left out of those. The training is not touched: a probe
works on copies.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trials.engine.lanes import Lanes
from trials.engine.networks import LaneNetwork
from trials.engine.optim import Optimiser, Schedule
from trials.normalisers import FACTS, in_head
from trials.records import PROBES, TrialConfig

MOST_BATCHES = 16  # of small batches, so that a probe stays cheap
_MOST_ROWS = 512  # of the patches or tokens of a batch
_MOST_VALUES = 2**26  # of what lanes record at once: patches are many times the images they are cut from
_DRAW = (3, 1)  # `default_rng([split_seed, *_DRAW])`: a stream that neither splits nor epochs draw from

_OF_GRADIENT = ("alignment", "update_gain", "interference")


def probe_rows(config: TrialConfig, samples: int) -> np.ndarray:
    """Rows of the training split that probes look at, int64 [batches, B]: the same at every probe of a study."""
    wanted = (config.probe_samples or 0) // config.batch_size
    batches = max(1, min(wanted, MOST_BATCHES, samples // config.batch_size))
    order = np.random.default_rng([config.split_seed, *_DRAW]).permutation(samples)
    return order[: batches * config.batch_size].reshape(batches, config.batch_size)


class _Row(NamedTuple):
    """What the network recorded of one affine map, [N or 1, rows, ...]."""

    x: Tensor
    u: Tensor
    z: Tensor


class _Scales(NamedTuple):
    """What multiplies an output's row of W, and its b, [N, 1, out]."""

    weight: Tensor
    bias: Tensor


def probe(
    network: LaneNetwork,
    config: TrialConfig,
    lanes: Lanes,
    state: Mapping[str, Tensor],
    train: tuple[Tensor, Tensor],
    update: int,
    updates: int,
) -> dict[str, Tensor]:
    """Probe all lanes of a block.

    Args:
        network: the block's.
        config: a trial of the pack.
        lanes: the block's seeds, step sizes and weight decays.
        state: what `Trainer.state` says the lanes carry.
        train: the training split on the device, inputs [n, features] and labels [n].
        update: optimiser steps taken so far.
        updates: of the whole budget.

    Returns:
        For each name of `trials.records.PROBES` its values, float64 [N, maps]. Where a lane is not
        finite, so is its row, and no other.
    """
    inputs, labels = train
    factor = Schedule(config).factor(min(update, updates - 1), updates)
    rows = torch.from_numpy(probe_rows(config, len(labels))).to(labels.device)
    names, lanes_in_all = list(network.initial(0)), lanes.step_sizes.numel()
    at_once = max(1, _MOST_VALUES // max(1, _values_per_lane(network, config.batch_size)))
    slices = []
    for start in range(0, lanes_in_all, at_once):
        some = slice(start, start + at_once)
        block = _Block(network, config, _some(lanes, some), factor, {name: v[some] for name, v in state.items()}, names)
        batches = [_probe_batch(block, inputs[batch][None], labels[batch]) for batch in rows]
        slices.append(_mean({name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}))
    return {name: torch.cat([one[name] for one in slices]) for name in PROBES}


def _some(lanes: Lanes, some: slice) -> Lanes:
    """Step sizes and weight decays of some lanes, as if they were of one seed: a probe has one batch for all."""
    return Lanes(lanes.seeds[:1], lanes.step_sizes.reshape(1, -1)[:, some], lanes.weight_decays.reshape(1, -1)[:, some])


def _mean(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Over batches, the first axis; what is of the gradient over those that have one, NaN where none has."""
    has_gradient = values["has_gradient"]
    means = {name: values[name].mean(0) for name in PROBES if name not in _OF_GRADIENT}
    for name in _OF_GRADIENT:
        means[name] = values[name].where(has_gradient, 0).sum(0) / has_gradient.sum(0)
    return means


def _values_per_lane(network: LaneNetwork, batch_size: int) -> int:
    """How many values a lane has of its own in a record of one batch; found without computing any."""
    own = 0

    def record(name: str, x: Tensor, u: Tensor, z: Tensor) -> None:
        nonlocal own
        own += sum(value[0].numel() for value in (x, u, z) if len(value) == 2)

    with torch.no_grad():
        parameters, buffers = (
            {name: value.new_empty(2, *value.shape, device="meta") for name, value in one.items()}
            for one in (network.initial(0), network.buffers())
        )
        inputs = torch.empty(1, batch_size, math.prod(network.shape), device="meta")
        network.forward(parameters, buffers, inputs, training=True, record=record)
    return own


class _Block:
    """The lanes to be probed, as they are; nothing in here is changed."""

    def __init__(
        self,
        network: LaneNetwork,
        config: TrialConfig,
        lanes: Lanes,
        factor: float,
        state: Mapping[str, Tensor],
        names: list[str],
    ):
        self.network, self.config, self.lanes, self.factor, self.state = network, config, lanes, factor, state
        self.names = names
        self.parameters = {name: state[name].detach().requires_grad_() for name in self.names}
        device = self.parameters[self.names[0]].device
        self.rates = lanes.step_sizes.flatten().to(device) * factor
        self.is_plain = config.optimiser == "sgd" and not bool(lanes.weight_decays.any())

    def steps(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the optimiser's next step would add to each parameter, on copies of what it keeps."""
        some, factors = self.parameters[self.names[0]], self.network.rate_factors(self.names)
        lanes = self.lanes
        optimiser = Optimiser(self.config, lanes.step_sizes, lanes.weight_decays, factors, some.device, some.dtype)
        moved = {name: value.detach().clone() for name, value in self.parameters.items()}
        kept = {name: self.state[name].clone() for name in optimiser.initial(moved)}
        optimiser.step(moved, gradients, kept, self.factor)
        return {name: value - self.parameters[name] for name, value in moved.items()}


def _probe_batch(block: _Block, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    buffers = {name: block.state[name].clone() for name in block.network.buffers()}
    recorded: dict[str, _Row] = {}
    with torch.enable_grad():
        logits = block.network.forward(
            block.parameters,
            buffers,
            inputs,
            training=True,
            record=lambda name, *row: recorded.update({name: _Row(*row)}),
        )
        losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    weights = torch.full_like(losses, 1 / len(labels))
    outputs = [row.z for row in recorded.values()]
    # Gradients of parameters are large, and plain gradient descent on few rows can do without them.
    is_small = block.is_plain and all(z.shape[1] <= _MOST_ROWS for z in outputs)
    wanted = [] if is_small else list(block.parameters.values())
    found = torch.autograd.grad(losses, [*outputs, *wanted], weights)
    with torch.no_grad():
        gradients = None if is_small else dict(zip(block.names, found[len(outputs) :], strict=True))
        steps = None if gradients is None or block.is_plain else block.steps(gradients)
        columns = [
            _measure(block, name, _thinned(row, gradient), gradients, steps, row.z.shape[1] == len(labels))
            for (name, row), gradient in zip(recorded.items(), found, strict=False)
        ]
        lanes = len(block.rates)
        return {name: torch.stack([column[name].expand(lanes) for column in columns], dim=1) for name in columns[0]}


def _thinned(row: _Row, gradient: Tensor) -> tuple[_Row, Tensor]:
    """Some of many rows, and the same rows of dL/dz.

    Drawn, the same at every probe, and not every k-th: in step with the image's width, those would be all
    of the same few columns.
    """
    count = row.z.shape[1]
    if count <= _MOST_ROWS:
        return _Row(*(value.detach() for value in row)), gradient
    chosen = np.sort(np.random.default_rng(count).choice(count, _MOST_ROWS, replace=False))
    rows = torch.from_numpy(chosen).to(gradient.device)
    return _Row(*(value.detach()[:, rows] for value in row)), gradient[:, rows]


def _measure(
    block: _Block,
    name: str,
    thinned: tuple[_Row, Tensor],
    gradients: Mapping[str, Tensor] | None,
    steps: Mapping[str, Tensor] | None,
    rows_are_samples: bool,
) -> dict[str, Tensor]:
    """The values of one map, [N] or [1] (where all lanes share its input) each.

    Without `gradients` of the parameters the rows are all there are; without `steps` the optimiser is
    plain gradient descent.
    """
    (x, u, _), gradient = thinned
    normaliser = _normaliser(block.config, name)
    divergence = x.double().square().sum(-1) + 1  # [N or 1, rows]
    lengths = u.double().square().sum(-1)
    bias_factor = divergence.rsqrt() if FACTS[normaliser].divides_bias else torch.ones_like(divergence)
    weighing = 1 / divergence if normaliser == "gradient_only" else torch.ones_like(divergence)
    gain = block.parameters.get(f"{name}.gain") if FACTS[normaliser].gain == "outputs" else None
    weight_scale = torch.ones_like(gradient[:, :1]) if gain is None else gain.detach().unsqueeze(1)
    scales = _Scales(weight_scale, weight_scale if FACTS[normaliser].divides_bias else torch.ones_like(weight_scale))
    c = bias_factor.to(gradient.dtype).unsqueeze(-1)

    if gradients is None:
        weighed = gradient * weighing.to(gradient.dtype).unsqueeze(-1)
        total = (u @ u.mT) @ weighed * scales.weight.square() + c * (c * weighed).sum(1, True) * scales.bias.square()
    else:
        total = _moved(name, u, c, gradients, scales)
    if steps is None:
        rate = block.rates * block.network.rate_factors([f"{name}.weight"])[f"{name}.weight"]
        change = total * -rate.to(total.dtype).view(-1, 1, 1)
    else:
        change = _moved(name, u, c, steps, scales)
    weight_share, bias_share = (
        (weighing * squares).to(gradient.dtype).unsqueeze(-1) for squares in (lengths, bias_factor.square())
    )
    own = gradient * (weight_share * scales.weight.square() + bias_share * scales.bias.square())
    others = (total - own).double().square().sum((1, 2))
    interference = others / (own.double().square().sum((1, 2)) + others)
    size = gradient.double().square().sum((1, 2))
    along = -(change.double() * gradient).sum((1, 2))
    norms = lengths.sqrt()
    return {
        "divergence_mean": divergence.mean(1),
        "divergence_sd": divergence.std(1, correction=0),
        "alignment": along / (size * change.double().square().sum((1, 2))).sqrt(),
        "update_gain": along / (block.rates * size),
        "interference": interference if rows_are_samples else torch.full_like(interference, torch.nan),
        "input_norm_mean": norms.mean(1),
        "input_norm_sd": norms.std(1, correction=0),
        "input_directions": _participation(u, lengths),
        "has_gradient": size != 0,  # so a NaN is one, and stays to be seen
    }


def _normaliser(config: TrialConfig, name: str) -> str:
    """Of the map called `name`. Those that change the formula above have no placement `post`."""
    if config.model == "cnn" and name == "head":
        return in_head(config.normaliser)
    return config.normaliser


def _moved(name: str, u: Tensor, c: Tensor, changes: Mapping[str, Tensor], scales: _Scales) -> Tensor:
    """W u + c b of each row, [N, rows, out], with changes of W and b for W and b; scaled as outputs are."""
    weight, bias = changes[f"{name}.weight"].flatten(2), changes[f"{name}.bias"]
    lanes, groups = len(weight), len(u)
    product = u @ weight.view(groups, -1, weight.shape[-1]).mT  # lanes that share their input: one product
    moved = product.unflatten(-1, (lanes // groups, -1)).transpose(1, 2).reshape(lanes, u.shape[1], -1)
    return moved * scales.weight + c * bias.unsqueeze(1) * scales.bias


def _participation(u: Tensor, lengths: Tensor) -> Tensor:
    """(tr M)²/tr(M²); through the smaller of the two Gram matrices, which have the same trace of squares."""
    wide = u.double()
    gram = wide @ wide.mT if u.shape[1] <= u.shape[2] else wide.mT @ wide
    return lengths.sum(1).square() / gram.square().sum((1, 2))
