"""Multilayer perceptrons with a leading lane axis, their initialisation, and their gradients by hand.

A model holds N = G × L networks of one shape: G groups, one per seed, of L lanes that share the
seed and so their batches. Lane g·L + l is lane l of group g. Each affine map is one matrix [W b]
that multiplies the normalised, augmented input (see `fused_normalisers`); samples stand in columns.

    weights[0]   [G, L·out, padded]   the lanes of a group side by side: one dense product per group
    weights[i]   [N, out, in + 1]     the later maps

The first matrix is padded with zero columns to a multiple of 16, for aligned rows; as the input
is zero there too, they stay zero.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trials.engine.fused_normalisers import make_normaliser
from trials.engine.products import product

LEAKY_SLOPE = 0.01
_ALIGNMENT = 16  # float32 values per cache line


class Activation(NamedTuple):
    """An activation and its gradient: `backward(gradient, z, h)` is dL/dz, with h = forward(z)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


_ops = torch.ops.aten
ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda gradient, z, h: _ops.tanh_backward(gradient, h)),
    "relu": Activation(torch.relu, lambda gradient, z, h: _ops.threshold_backward(gradient, h, 0)),
    "leaky_relu": Activation(
        lambda z: F.leaky_relu(z, LEAKY_SLOPE),
        lambda gradient, z, h: _ops.leaky_relu_backward(gradient, z, LEAKY_SLOPE, False),
    ),
    "gelu": Activation(F.gelu, lambda gradient, z, h: _ops.gelu_backward(gradient, z)),
    "identity": Activation(lambda z: z, lambda gradient, z, h: gradient),
}


def initial_parameters(sizes: Sequence[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    """(W [out, in], b [out]) of each affine map, drawn from `seed` alone.

    PyTorch's default for `nn.Linear`: both uniform on ±1/sqrt(in). The same seed gives the same
    values for every normaliser, learning rate and batch size, so arms are paired.

    Args:
        sizes: features, widths of the hidden layers, classes.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        bound = 1 / math.sqrt(fan_in)
        weight = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(fan_out).uniform_(-bound, bound, generator=generator)
        parameters.append((weight, bias))
    return parameters


class _Saved(NamedTuple):
    z: Tensor
    h: Tensor
    u: Tensor
    scale: Tensor | None


class MLP:
    """N = len(seeds) × lanes_per_seed networks. Raises ValueError for unknown names."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        normaliser: str,
        seeds: Sequence[int],
        lanes_per_seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.sizes = tuple(sizes)
        self.groups, self.lanes_per_seed = len(seeds), lanes_per_seed
        self.lanes = self.groups * lanes_per_seed
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}")
        self._activation = ACTIVATIONS[activation]
        self.padded = math.ceil((sizes[0] + 1) / _ALIGNMENT) * _ALIGNMENT
        self.weights = self._initial_weights(seeds, device, dtype)
        leading = [(self.groups,), *[(self.lanes,)] * (len(sizes) - 2)]
        self.normalisers = [
            make_normaliser(normaliser, self.weights[0], axes, features)
            for axes, features in zip(leading, sizes[:-1], strict=True)
        ]
        self._buffers: list[Tensor] = []
        self._saved: list[_Saved] = []

    def parameters(self, lane: int) -> list[tuple[Tensor, Tensor]]:
        """Views of one lane's (W [out, in], b [out]), as `initial_parameters` gives them."""
        group, place = divmod(lane, self.lanes_per_seed)
        first = self.weights[0][group].unflatten(0, (self.lanes_per_seed, -1))[place]
        own = [first[:, : self.sizes[0] + 1], *(weight[lane] for weight in self.weights[1:])]
        return [(weight[:, :-1], weight[:, -1]) for weight in own]

    def input_buffer(self, *leading: int) -> Tensor:
        """Room for augmented inputs as rows, [*leading, padded]: ones at the constant, zeros beside it."""
        buffer = self.weights[0].new_zeros(*leading, self.padded)
        buffer[..., self.sizes[0]] = 1
        return buffer

    def augmented(self, buffer: Tensor) -> Tensor:
        """A view of `buffer`'s rows without padding, samples in columns: [..., features + 1, samples]."""
        return buffer.narrow(-1, 0, self.sizes[0] + 1).mT

    def train_forward(self, z: Tensor) -> Tensor:
        """Logits [N, classes, B] from the first map's output [G, L·out, B]; keeps what `train_backward` needs."""
        z = z.view(self.lanes, -1, z.shape[-1])
        if not self._buffers or self._buffers[0].shape[-1] != z.shape[-1]:
            self._buffers = [z.new_ones(self.lanes, weight.shape[-1], z.shape[-1]) for weight in self.weights[1:]]
        self._saved = []
        for weight, normaliser, u in zip(self.weights[1:], self.normalisers[1:], self._buffers, strict=True):
            h = self._activation.forward(z)
            scale = normaliser.train(h, u)
            self._saved.append(_Saved(z, h, u, scale))
            z = torch.bmm(weight, u)
        return z

    def train_backward(self, gradient: Tensor) -> Tensor:
        """Take one step on every map but the first.

        Args:
            gradient: learning rate × d(mean loss)/d(logits), [N, classes, B]: the learning rate
                lives in the loss, so that each update is a plain subtraction.

        Returns:
            The same for the first map's output, [G, L·out, B].
        """
        later = zip(self.weights[1:], self.normalisers[1:], self._saved, strict=True)
        for weight, normaliser, (z, h, u, scale) in reversed(list(later)):
            into_u = torch.bmm(weight.mT, gradient)
            weighed = gradient * scale if normaliser.weighs_samples and scale is not None else gradient
            weight.baddbmm_(weighed, u.mT, alpha=-1)
            gradient = self._activation.backward(normaliser.backward(into_u, u, scale), z, h)
        return gradient.reshape(self.groups, -1, gradient.shape[-1])

    def evaluate(self, rows: Tensor) -> Tensor:
        """Logits [N, classes, n] of inputs [n, features], the same for all lanes."""
        first = self.normalisers[0]
        buffer = self.input_buffer(*([self.groups] if first.separate_in_evaluation else []), len(rows))
        first.evaluate(rows.mT, self.augmented(buffer))
        z = product(self.weights[0], buffer).view(self.lanes, -1, len(rows))
        for weight, normaliser in zip(self.weights[1:], self.normalisers[1:], strict=True):
            u = z.new_ones(self.lanes, weight.shape[-1], len(rows))
            normaliser.evaluate(self._activation.forward(z), u)
            z = torch.bmm(weight, u)
        return z

    def squared_norms(self) -> Tensor:
        """Sum of squared weights of each lane, [N]; not finite once a weight is not, or is about to overflow."""
        norms = [weight.view(self.lanes, -1).square().sum(-1) for weight in self.weights]
        return torch.stack(norms).sum(0)

    def _initial_weights(self, seeds: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
        per_seed = [initial_parameters(self.sizes, seed) for seed in seeds]
        weights = []
        for index in range(len(self.sizes) - 1):
            joined = torch.stack([torch.cat([p[index][0], p[index][1][:, None]], dim=1) for p in per_seed])
            if index == 0:
                joined = F.pad(joined, (0, self.padded - joined.shape[-1]))
                weight = joined.repeat(1, self.lanes_per_seed, 1)
            else:
                weight = joined.repeat_interleave(self.lanes_per_seed, dim=0)
            weights.append(weight.to(device, dtype).contiguous())
        return weights
