"""Networks of many lanes for the general path: one forward pass of N networks, differentiated by autograd.

N = G · L lanes: G groups of L lanes whose batches are the same; lane g·L + l is lane l of group g.
A network holds no values: parameters and running statistics are dictionaries of [N, ...] tensors that
come with each call, so that a lane can be moved to another block by picking its rows.

The lanes of a group share their input, so the first affine map is one dense product per group; what a
normaliser or a gain does to that input differently in each lane is folded into its weights instead.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trials.engine.functional import (
    affine,
    batch_norm,
    folded,
    normalise,
    running_scale,
    scaled,
)
from trials.engine.fused_mlp import ACTIVATIONS
from trials.normalisers import DENSE, FACTS
from trials.records import TrialConfig

Recorder = Callable[[str, Tensor, Tensor, Tensor], None]
"""record(map, x, u, z): the map's raw input, what its weights multiply, and its output before placement-post
normalisation and activation, each [N, samples, n] (x and u of the first map may be [G, samples, n])."""


class Pass(NamedTuple):
    """What one forward pass needs beside its inputs; see `LaneNetwork.forward`."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    training: bool
    record: Recorder | None


class LaneNetwork(ABC):
    """A network's shape and its forward pass over lanes.

    Args:
        config: any trial of the pack; model, normaliser, placement and gain hold for all lanes.
        shape: (channels, height, width) of a sample.
        classes: number of classes.

    Raises:
        ValueError: where the config does not fit a network of this kind, or the shape.
    """

    affine_maps: tuple[str, ...]
    """Names of the affine maps, first to last; parameters are `<map>.weight`, `.bias`, `.gain`, `.shift`."""

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        self.config, self.shape, self.classes = config, shape, classes
        if config.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {config.activation!r}; known: {', '.join(ACTIVATIONS)}")
        if config.placement not in ("pre", "post"):
            raise ValueError(f"unknown placement {config.placement!r}; known: pre, post")
        self.activation = ACTIVATIONS[config.activation].forward

    def rate_factors(self, names: Iterable[str]) -> dict[str, float]:
        """What the step size of each of the parameters called `names` is multiplied by."""
        factor = rate_factor(self.config)
        return {name: factor if name.rpartition(".")[0] in self.affine_maps else 1.0 for name in names}

    @abstractmethod
    def initial(self, seed: int) -> dict[str, Tensor]:
        """One lane's parameters without a lane axis, on the CPU in float32, drawn from `seed` alone.

        Weights and biases are the same for every normaliser, placement, gain, learning rate and batch size.
        """

    @abstractmethod
    def buffers(self) -> dict[str, Tensor]:
        """One lane's running statistics (`<map>.mean`, `<map>.variance`) at the start; {} without batch norm."""

    @abstractmethod
    def forward(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        *,
        training: bool,
        record: Recorder | None = None,
    ) -> Tensor:
        """Logits [N, B, classes].

        Args:
            parameters: [N, ...] each.
            buffers: [N, ...] each; in training batch norm changes them in place.
            inputs: [G, B, features], samples flattened from (channels, height, width); G = 1 serves all lanes.
            training: whether batch norm takes the batch's statistics.
            record: called for each affine map, first to last, with tensors of the graph; z requires its gradient.
        """


class DenseMap:
    """One affine map of every lane with its normaliser, on [N or G, samples, inputs].

    Args:
        name: prefix of its parameters.
        inputs: features in.
        outputs: features out.
        normaliser: one of `trials.normalisers.DENSE`.
        placement: `post` normalises the output.
        gain: whether what is normalised has a learnable scale (batch and layer norm: and shift).
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        normaliser: str = "none",
        placement: str = "pre",
        gain: bool = False,
    ):
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.normaliser, self.post = normaliser, placement == "post"
        self._normalised = outputs if self.post else inputs
        self._gain = gain and FACTS[normaliser].gain is not None
        self._shift = self._gain and FACTS[normaliser].shift

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One lane's parameters: weight, then bias, uniform on ±1/sqrt(inputs), as PyTorch's `nn.Linear`."""
        bound = 1 / math.sqrt(self.inputs)
        parameters = {
            f"{self.name}.weight": torch.empty(self.outputs, self.inputs).uniform_(-bound, bound, generator=generator),
            f"{self.name}.bias": torch.empty(self.outputs).uniform_(-bound, bound, generator=generator),
        }
        if self._gain:
            scales = self.outputs if FACTS[self.normaliser].gain == "outputs" else self._normalised
            parameters[f"{self.name}.gain"] = torch.ones(scales)
        if self._shift:
            parameters[f"{self.name}.shift"] = torch.zeros(self._normalised)
        return parameters

    def buffers(self) -> dict[str, Tensor]:
        if self.normaliser != "batch_norm":
            return {}
        return {
            f"{self.name}.mean": torch.zeros(self._normalised),
            f"{self.name}.variance": torch.ones(self._normalised),
        }

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        """[N, samples, outputs] from x [N, samples, inputs], or from [G, samples, inputs] that lanes share."""
        name = self.normaliser
        weight, bias = run.parameters[f"{self.name}.weight"], run.parameters[f"{self.name}.bias"]
        if self.post:
            z = _shared_affine("none", x, weight, bias)
            z = self._recorded(run, x, x, z)
            z, gain, shift = self._batch_normalised(z, run)
            return scaled(z if name == "batch_norm" else normalise(name, z), gain, shift)
        inner, gain, shift = self._batch_normalised(x, run)
        if name == "batch_norm":
            name = "none"
        z = _shared_affine(name, inner, weight, bias, gain, shift)
        if run.record is None:
            return z
        u = normalise(name, inner)
        if name != "affine_like" and (gain is not None or shift is not None):
            u = scaled(u.repeat_interleave(len(weight) // len(u), 0), gain, shift)
        return self._recorded(run, x, u, z)

    def _batch_normalised(self, x: Tensor, run: Pass) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x as batch norm leaves it, if it is that, and the gain and shift per lane that are still to act."""
        gain = run.parameters[f"{self.name}.gain"] if self._gain else None
        shift = run.parameters[f"{self.name}.shift"] if self._shift else None
        if self.normaliser != "batch_norm":
            return x, gain, shift
        mean, variance = run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.variance"]
        if run.training:
            return batch_norm(x, mean, variance), gain, shift
        scale, offset = running_scale(mean, variance)
        if gain is not None and shift is not None:
            scale, offset = scale * gain, offset * gain + shift
        return x, scale, offset

    def _recorded(self, run: Pass, x: Tensor, u: Tensor, z: Tensor) -> Tensor:
        if run.record is not None:
            if not z.requires_grad:
                z.requires_grad_()
            run.record(self.name, x, u, z)
        return z


def _shared_affine(
    name: str, x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """`functional.affine` over lanes, [N, samples, out], where each of the G rows of x serves N/G lanes in a row."""
    lanes, groups = len(weight), len(x)
    if lanes == groups:
        return affine(name, x, weight, bias, gain, shift)
    if gain is not None and name != "affine_like":
        weight, bias, gain = *folded(weight, bias, gain, shift), None
    z = affine(name, x, weight.reshape(groups, -1, weight.shape[-1]), bias.reshape(groups, -1))
    return scaled(z.unflatten(-1, (lanes // groups, -1)).transpose(1, 2).flatten(0, 1), gain, None)


class DenseNetwork(LaneNetwork):
    """What the networks of dense maps have in common. Subclasses make their maps with `_map`, first to last."""

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        super().__init__(config, shape, classes)
        if config.normaliser not in DENSE:
            known = ", ".join(DENSE)
            raise ValueError(f"normaliser {config.normaliser!r} is not for a model of kind {config.model}; use {known}")
        if config.placement == "post" and not FACTS[config.normaliser].post:
            raise ValueError(f"placement 'post' has no meaning for normaliser {config.normaliser!r}; use 'pre'")
        self.affine_maps = ()
        self._maps: dict[str, DenseMap] = {}

    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parameters: dict[str, Tensor] = {}
        for one in self._maps.values():
            parameters |= one.initial(generator)
        return parameters

    def buffers(self) -> dict[str, Tensor]:
        return {name: value for one in self._maps.values() for name, value in one.buffers().items()}

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        *,
        training: bool,
        record: Recorder | None = None,
    ) -> Tensor:
        return self._forward(inputs, Pass(parameters, buffers, training, record))

    @abstractmethod
    def _forward(self, inputs: Tensor, run: Pass) -> Tensor: ...

    def _map(self, name: str, inputs: int, outputs: int) -> DenseMap:
        config = self.config
        # The head has no activation to be normalised for.
        plain = name == "head" and config.placement == "post"
        normaliser = "none" if plain else config.normaliser
        self._maps[name] = DenseMap(name, inputs, outputs, normaliser, config.placement, config.gain)
        self.affine_maps = tuple(self._maps)
        return self._maps[name]


class MLP(DenseNetwork):
    """`depth` hidden layers, h ← activation(affine(h)), and an affine head; depth 0 is a linear model."""

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        super().__init__(config, shape, classes)
        widths = [math.prod(shape), *[config.width] * config.depth]
        self._hidden = [self._map(f"hidden{i + 1}", widths[i], config.width) for i in range(config.depth)]
        self._head = self._map("head", widths[-1], classes)

    def _forward(self, inputs: Tensor, run: Pass) -> Tensor:
        h = inputs
        for one in self._hidden:
            h = self.activation(one(h, run))
        return self._head(h, run)


class ResidualMLP(DenseNetwork):
    """A stem h = activation(affine(x)) to `width`, `depth` blocks h ← h + activation(affine(h)), an affine head."""

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        super().__init__(config, shape, classes)
        self._stem = self._map("stem", math.prod(shape), config.width)
        self._blocks = [self._map(f"block{i + 1}", config.width, config.width) for i in range(config.depth)]
        self._head = self._map("head", config.width, classes)

    def _forward(self, inputs: Tensor, run: Pass) -> Tensor:
        h = self.activation(self._stem(inputs, run))
        for block in self._blocks:
            h = h + self.activation(block(h, run))
        return self._head(h, run)


def make_network(config: TrialConfig, shape: tuple[int, int, int], classes: int) -> LaneNetwork:
    """The network a trial asks for.

    Raises:
        ValueError: for an unknown kind, and for options that do not fit the kind or the samples' shape.
    """
    from trials.engine.attention import Attention  # both build on this module
    from trials.engine.cnn import CNN

    kinds = {"mlp": MLP, "residual_mlp": ResidualMLP, "cnn": CNN, "attention": Attention}
    if config.model not in kinds:
        raise ValueError(f"unknown model {config.model!r}; known: {', '.join(kinds)}")
    return kinds[config.model](config, shape, classes)


def rate_factor(config: TrialConfig) -> float:
    """What the step size of affine maps' parameters is multiplied by."""
    return 0.5 if config.normaliser == "norm_like_half" else 1.0
