"""How large a trial's network is: parameters, arithmetic and activations, from its config alone. No torch here."""

import itertools
from typing import NamedTuple

from trials.normalisers import FACTS, in_head
from trials.records import TrialConfig

Shape = tuple[int, int, int]
"""(channels, height, width) of a sample, or of what a layer makes of it; a vector of n values is (1, 1, n)."""


class Sizes(NamedTuple):
    """Sizes of one trial's network; arithmetic and activations are per sample."""

    weights: int  # entries of the affine maps' matrices and kernels
    parameters: int  # all that is learnt: weights, biases, gains and shifts, positions
    training: int  # multiply-adds of a step: forward, and backward to weights and inputs (but not the first map's)
    evaluation: int  # multiply-adds of a forward pass
    activations: int  # values that the affine maps put out, and attention's weights
    maps: int  # affine maps


class ConvolutionShapes(NamedTuple):
    """What one layer of a cnn makes of a sample."""

    convolved: Shape  # after the convolution and its activation
    pooled: Shape  # after 2 × 2 pooling; the same without pooling


class _Map(NamedTuple):
    """An affine map as a matrix [outputs, inputs] that is used at `positions` places of a sample."""

    inputs: int
    outputs: int
    positions: int = 1
    features: int | None = None  # the normaliser's features, where they are not `inputs`: channels of a convolution


def sizes_of(config: TrialConfig, shape: Shape, classes: int) -> Sizes:
    """Sizes of the trial's network on samples of `shape`.

    Raises:
        ValueError: samples of this shape do not fit the network; the message says why.
    """
    extra_parameters = extra_arithmetic = extra_activations = 0
    if config.model == "cnn":
        maps = _cnn_maps(config, shape, classes)
    elif config.model == "attention":
        tokens, values = tokens_of(shape, config.patch or 1)
        maps = _attention_maps(config, tokens, values, classes)
        extra_parameters = tokens * config.width  # positions
        extra_arithmetic = config.depth * 2 * tokens**2 * config.width  # scores, and the mean of the values
        extra_activations = config.depth * (config.heads or 1) * tokens**2
    else:
        maps = _dense_maps(config, shape, classes)
    weights = sum(m.inputs * m.outputs for m in maps)
    forward = sum(m.inputs * m.outputs * m.positions for m in maps) + extra_arithmetic
    gains = sum(_gains(config, m, is_head=m is maps[-1]) for m in maps)
    return Sizes(
        weights=weights,
        parameters=weights + sum(m.outputs for m in maps) + gains + extra_parameters,
        training=3 * forward - maps[0].inputs * maps[0].outputs * maps[0].positions,
        evaluation=forward,
        activations=sum(m.outputs * m.positions for m in maps) + extra_activations,
        maps=len(maps),
    )


def cnn_shapes(config: TrialConfig, shape: Shape) -> list[ConvolutionShapes]:
    """What each layer of a cnn makes of samples of `shape`: kernels are padded by half their side, pooling drops
    an odd last row and column.

    Raises:
        ValueError: nothing is left of a sample before the last layer.
    """
    kernel, stride = config.kernel or 1, config.stride or 1
    layers: list[ConvolutionShapes] = []
    begun = shape
    for index, channels in enumerate(config.channels or ()):
        height, width = ((side + 2 * (kernel // 2) - kernel) // stride + 1 for side in shape[1:])
        convolved = channels, height, width
        if config.pooling != "none":
            height, width = height // 2, width // 2
        if height < 1 or width < 1:
            raise ValueError(f"samples of {_size(begun)} are too small: pooling leaves nothing after layer {index + 1}")
        shape = channels, height, width
        layers.append(ConvolutionShapes(convolved, shape))
    return layers


def tokens_of(shape: Shape, patch: int) -> tuple[int, int]:
    """(tokens, values per token) of an attention model: square patches of an image, or stretches of a vector.

    Raises:
        ValueError: the patches do not cover the sample exactly.
    """
    channels, height, width = shape
    tall = 1 if height == 1 else patch
    if height % tall or width % patch:
        raise ValueError(f"patches of side {patch} do not divide samples of {_size(shape)}")
    return height // tall * (width // patch), channels * tall * patch


def _dense_maps(config: TrialConfig, shape: Shape, classes: int) -> list[_Map]:
    features = shape[0] * shape[1] * shape[2]
    if config.model == "residual_mlp":
        widths = [features, config.width, *[config.width] * config.depth, classes]
    else:
        widths = [features, *[config.width] * config.depth, classes]
    return [_Map(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]


def _cnn_maps(config: TrialConfig, shape: Shape, classes: int) -> list[_Map]:
    maps: list[_Map] = []
    for layer in cnn_shapes(config, shape):
        channels, height, width = layer.convolved
        maps.append(_Map(shape[0] * (config.kernel or 1) ** 2, channels, height * width, features=shape[0]))
        shape = layer.pooled
    return [*maps, _Map(shape[0] * shape[1] * shape[2], classes)]


def _attention_maps(config: TrialConfig, tokens: int, values: int, classes: int) -> list[_Map]:
    width = config.width
    block = [*[_Map(width, width, tokens)] * 4, _Map(width, 2 * width, tokens), _Map(2 * width, width, tokens)]
    return [_Map(values, width, tokens), *block * config.depth, _Map(width, classes)]


def _gains(config: TrialConfig, affine_map: _Map, *, is_head: bool) -> int:
    """Learnable scales and shifts of a map's normaliser."""
    facts = FACTS[in_head(config.normaliser) if is_head else config.normaliser]
    if not config.gain or facts.gain is None:
        return 0
    if config.placement == "post" and is_head:
        return 0  # plain: there is no activation after it
    each = 2 if facts.shift else 1
    on_outputs = config.placement == "post" or facts.gain == "outputs"
    return each * (affine_map.outputs if on_outputs else affine_map.features or affine_map.inputs)


def _size(shape: Shape) -> str:
    channels, height, width = shape
    return f"{width} values" if channels == height == 1 else f"{height} × {width}"
