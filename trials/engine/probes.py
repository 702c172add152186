"""Probes: what an optimiser step does to activations, beside what it ought to do (arXiv 2512.22247).

For an affine map z = W u + b with input x (u is what its normaliser makes of x), a batch of B
samples and G = d(mean loss)/dz, one row per sample (of convolutions per patch, of attention per
token), gradient descent with step size η changes the outputs by

    Δz_i = −η Σ_j w_j G_j (u_j·u_i + c_j c_i)

where c is what multiplies the bias (1; for affine_like and patch_norm_affine 1/sqrt(‖x‖² + 1)) and w
is 1, for gradient_only 1/(‖x‖² + 1). The ideal is −η G_i. Everything is layer by layer: what a step
changes in the maps before is not counted. A probe measures, of each map of each lane, over its rows:

    divergence_mean, divergence_sd   of ‖x‖² + 1, the affine divergence
    alignment       cosine of Δz and −G, all rows together; Δz by the trial's own optimiser, weight
                    decay and schedule included, from the state it is in (W and b; not gains)
    update_gain     ⟨Δz, −G⟩ / (η ‖G‖²): 1 is ideal, for a single sample and SGD it is w (‖u‖² + c²)
    interference    Σ‖others_i‖² / Σ(‖own_i‖² + ‖others_i‖²): the terms j ≠ i of the sum above against
                    j = i. It is of the gradient, whatever the optimiser; 0 for a batch of one
    input_norm_mean, input_norm_sd   of ‖u‖
    input_directions                 (tr M)²/tr(M²), M = Σ u uᵀ / rows

Each is the mean over a few fixed batches of the training split, the same for every trial of a study,
of the trial's own batch size. The training is not touched: a probe works on copies.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trials.engine.lanes import Lanes
from trials.engine.networks import LaneNetwork
from trials.engine.optim import Optimiser, Schedule
from trials.records import PROBES, TrialConfig

MOST_BATCHES = 16  # of small batches, so that a probe stays cheap
_MOST_ROWS = 512  # of the patches or tokens of a batch, evenly chosen
_DRAW = 3  # of `default_rng([split_seed, k])`: 0 and 1 draw the splits, 2 the synthetic data set

_OUTPUT_SCALED = ("affine_like", "patch_norm", "patch_norm_affine")  # their gain is a factor of outputs
_BIAS_SCALED = ("affine_like", "patch_norm_affine")


def probe_rows(config: TrialConfig, samples: int) -> np.ndarray:
    """Rows of the training split that probes look at, int64 [batches, B]: the same at every probe of a study."""
    wanted = (config.probe_samples or 0) // config.batch_size
    batches = max(1, min(wanted, MOST_BATCHES, samples // config.batch_size))
    order = np.random.default_rng([config.split_seed, _DRAW]).permutation(samples)
    return order[: batches * config.batch_size].reshape(batches, config.batch_size)


class _Row(NamedTuple):
    """What the network recorded of one affine map, [N or 1, rows, ...]."""

    x: Tensor
    u: Tensor
    z: Tensor


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
    block = _Block(network, config, lanes, factor, state)
    sums: dict[str, Tensor] = {}
    rows = torch.from_numpy(probe_rows(config, len(labels))).to(labels.device)
    for batch in rows:
        for name, value in _probe_batch(block, inputs[batch][None], labels[batch]).items():
            sums[name] = sums[name] + value if name in sums else value
    return {name: sums[name] / len(rows) for name in PROBES}


class _Block:
    """The lanes to be probed, as they are; nothing in here is changed."""

    def __init__(
        self, network: LaneNetwork, config: TrialConfig, lanes: Lanes, factor: float, state: Mapping[str, Tensor]
    ):
        self.network, self.config, self.lanes, self.factor, self.state = network, config, lanes, factor, state
        self.names = list(network.initial(0))
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
            _measure(block, name, _thinned(row, gradient), gradients, steps)
            for (name, row), gradient in zip(recorded.items(), found, strict=False)
        ]
        lanes = len(block.rates)
        return {name: torch.stack([column[name].expand(lanes) for column in columns], dim=1) for name in PROBES}


def _thinned(row: _Row, gradient: Tensor) -> tuple[_Row, Tensor]:
    """Some of many rows, and the same rows of dL/dz."""
    stride = -(-row.z.shape[1] // _MOST_ROWS)
    return _Row(*(value.detach()[:, ::stride] for value in row)), gradient[:, ::stride]


def _measure(
    block: _Block,
    name: str,
    thinned: tuple[_Row, Tensor],
    gradients: Mapping[str, Tensor] | None,
    steps: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """The values of one map, [N] or [1] (where all lanes share its input) each.

    Without `gradients` of the parameters the rows are all there are; without `steps` the optimiser is
    plain gradient descent.
    """
    (x, u, _), gradient = thinned
    normaliser = block.config.normaliser if block.config.placement == "pre" else "none"
    divergence = x.double().square().sum(-1) + 1  # [N or 1, rows]
    lengths = u.double().square().sum(-1)
    bias_factor = divergence.rsqrt() if normaliser in _BIAS_SCALED else torch.ones_like(divergence)
    weighing = 1 / divergence if normaliser == "gradient_only" else torch.ones_like(divergence)
    scale = block.parameters.get(f"{name}.gain") if normaliser in _OUTPUT_SCALED else None

    if gradients is None:
        products = u @ u.mT + (bias_factor.unsqueeze(-1) * bias_factor.unsqueeze(-2)).to(u.dtype)
        total = products @ (gradient * weighing.to(gradient.dtype).unsqueeze(-1))
        if scale is not None:
            total = total * scale.detach().unsqueeze(1).square()
    else:
        total = _moved(name, u, bias_factor, gradients, scale)
    if steps is None:
        rate = block.rates * block.network.rate_factors([f"{name}.weight"])[f"{name}.weight"]
        change = total * -rate.to(total.dtype).view(-1, 1, 1)
    else:
        change = _moved(name, u, bias_factor, steps, scale)
    own = gradient * (weighing * (lengths + bias_factor.square())).to(gradient.dtype).unsqueeze(-1)
    if scale is not None:
        own = own * scale.detach().unsqueeze(1).square()
    others = (total - own).double().square().sum((1, 2))
    size = gradient.double().square().sum((1, 2))
    along = -(change.double() * gradient).sum((1, 2))
    norms = lengths.sqrt()
    return {
        "divergence_mean": divergence.mean(1),
        "divergence_sd": divergence.std(1, correction=0),
        "alignment": along / (size * change.double().square().sum((1, 2))).sqrt(),
        "update_gain": along / (block.rates * size),
        "interference": others / (own.double().square().sum((1, 2)) + others),
        "input_norm_mean": norms.mean(1),
        "input_norm_sd": norms.std(1, correction=0),
        "input_directions": _participation(u, lengths),
    }


def _moved(name: str, u: Tensor, bias_factor: Tensor, changes: Mapping[str, Tensor], scale: Tensor | None) -> Tensor:
    """W u + c b of each row, [N, rows, out], with changes of W and b for W and b; scaled where outputs are."""
    weight, bias = changes[f"{name}.weight"].flatten(2), changes.get(f"{name}.bias")
    lanes, groups = len(weight), len(u)
    product = u @ weight.view(groups, -1, weight.shape[-1]).mT  # lanes that share their input: one product
    moved = product.unflatten(-1, (lanes // groups, -1)).transpose(1, 2).reshape(lanes, u.shape[1], -1)
    if bias is not None:
        moved = moved + bias_factor.to(moved.dtype).unsqueeze(-1) * bias.unsqueeze(1)
    return moved if scale is None else moved * scale.detach().unsqueeze(1)


def _participation(u: Tensor, lengths: Tensor) -> Tensor:
    """(tr M)²/tr(M²); through the smaller of the two Gram matrices, which have the same trace of squares."""
    wide = u.double()
    gram = wide @ wide.mT if u.shape[1] <= u.shape[2] else wide.mT @ wide
    return lengths.sum(1).square() / gram.square().sum((1, 2))
