"""Sizes of networks, against plain PyTorch modules that are built and run."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.studies import plan
from trials.engine.networks import make_network
from trials.records import TrialConfig
from trials.sizes import cnn_shapes, sizes_of, tokens_of

CLASSES = 10


def config(normaliser: str = "none", dataset: str = "digits", **model: Any) -> TrialConfig:
    changes = {"model": model, "data.dataset": dataset, "space.normaliser": [normaliser], "hypotheses": []}
    return plan(**changes).packs[0].config


def measured(network: nn.Module, shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """(parameters, multiply-adds, activations, multiply-adds of the first map) of a forward pass, counted."""
    arithmetic: list[int] = []
    activations: list[int] = []

    def count(module: Any, _: Any, output: torch.Tensor) -> None:
        activations.append(output.numel())
        positions = output.numel() // module.weight.shape[0]
        arithmetic.append(module.weight.numel() * positions)

    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(count)
    network(torch.zeros(1, *shape))
    return sum(p.numel() for p in network.parameters()), sum(arithmetic), sum(activations), arithmetic[0]


def check(trial: TrialConfig, network: nn.Module, shape: tuple[int, int, int]) -> None:
    parameters, forward, activations, first = measured(network, shape)
    sizes = sizes_of(trial, shape, CLASSES)
    assert (sizes.parameters, sizes.evaluation, sizes.activations) == (parameters, forward, activations)
    assert sizes.training == 3 * forward - first


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_mlp(depth):
    widths = [64, *[12] * depth]
    maps = [nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], CLASSES], strict=True)]
    check(config(kind="mlp", width=12, depth=depth), nn.Sequential(nn.Flatten(), *maps), (1, 8, 8))


def test_residual_mlp():
    maps = [nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)]
    check(config(kind="residual_mlp", width=12, depth=2), nn.Sequential(nn.Flatten(), *maps), (1, 8, 8))


@pytest.mark.parametrize("pooling", ["max", "average", "none"])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 1)])
def test_cnn(kernel, stride, pooling):
    shape = (3, 32, 32)
    trial = config(dataset="cifar10", kind="cnn", channels=[4, 6], kernel=kernel, stride=stride, pooling=pooling)
    pool = {"max": nn.MaxPool2d(2), "average": nn.AvgPool2d(2), "none": nn.Identity()}[pooling]
    body = nn.Sequential(
        nn.Conv2d(3, 4, kernel, stride, kernel // 2), pool, nn.Conv2d(4, 6, kernel, stride, kernel // 2), pool
    )
    left = body(torch.zeros(1, *shape))[0]
    assert cnn_shapes(trial, shape)[-1].pooled == tuple(left.shape)
    check(trial, nn.Sequential(body, nn.Flatten(), nn.Linear(left.numel(), CLASSES)), shape)


class Attention(nn.Module):
    """A block-wise attention model, with its learned positions."""

    def __init__(self, values: int, tokens: int, width: int, depth: int):
        super().__init__()
        self.embed, self.head = nn.Linear(values, width), nn.Linear(width, CLASSES)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = [
            [*(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]
            for _ in range(depth)
        ]
        self.listed = nn.ModuleList(affine_map for block in self.blocks for affine_map in block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x.reshape(-1, self.embed.in_features)) + self.positions
        for query, key, value, out, up, down in self.blocks:
            mixed = torch.softmax(query(tokens) @ key(tokens).T, -1) @ value(tokens)
            tokens = down(up(out(mixed)))
        return self.head(tokens.mean(0))


def test_attention():
    trial = config(kind="attention", width=12, depth=2, heads=3, patch=2)
    sizes = sizes_of(trial, (1, 8, 8), CLASSES)
    parameters, maps, activations, first = measured(Attention(4, 16, 12, 2), (1, 8, 8))
    scores = 2 * 16**2 * 12  # per block, the scores and as much again for the mean of the values
    assert (sizes.parameters, sizes.evaluation) == (parameters, maps + 2 * scores)
    assert sizes.activations == activations + 2 * 3 * 16**2
    assert sizes.training == 3 * sizes.evaluation - first


def test_tokens_of_images_and_of_vectors():
    assert tokens_of((3, 32, 16), 4) == (32, 48)
    assert tokens_of((1, 1, 24), 4) == (6, 4)
    for shape in ((3, 30, 32), (3, 32, 30), (1, 1, 26)):
        with pytest.raises(ValueError, match="do not divide"):
            tokens_of(shape, 4)


def test_cnn_of_samples_that_are_too_small():
    trial = config(dataset="cifar10", kind="cnn", channels=[4, 4, 4])
    assert cnn_shapes(trial, (3, 8, 8))[-1].pooled == (4, 1, 1)
    with pytest.raises(ValueError, match=r"7 × 8 are too small: pooling leaves nothing after layer 3"):
        cnn_shapes(trial, (3, 7, 8))


@pytest.mark.parametrize(
    ("normaliser", "placement", "gains"),
    [
        ("none", "pre", 0),
        ("gradient_only", "pre", 0),
        ("layer_norm", "pre", 2 * (64 + 12)),
        ("rms_norm", "pre", 64 + 12),
        ("norm_like", "pre", 64 + 12),
        ("affine_like", "pre", 12 + 10),
        ("batch_norm", "post", 2 * 12),
        ("rms_norm", "post", 12),
    ],
)
def test_gains_are_counted(normaliser, placement, gains):
    trial = config(normaliser, kind="mlp", width=12, placement=placement, gain=True)
    plain = 64 * 12 + 12 + 12 * 10 + 10
    assert sizes_of(trial, (1, 8, 8), CLASSES).parameters == plain + gains


@pytest.mark.parametrize("kind", ["mlp", "residual_mlp", "attention"])
@pytest.mark.parametrize(
    ("normaliser", "placement"),
    [("none", "pre"), ("affine_like", "pre"), ("rms_norm", "post"), ("batch_norm", "pre"), ("layer_norm", "post")],
)
def test_parameters_are_the_engines(kind, normaliser, placement):
    trial = config(normaliser, kind=kind, width=12, depth=2, placement=placement, gain=True)
    parameters = make_network(trial, (1, 8, 8), CLASSES).initial(0)
    assert sizes_of(trial, (1, 8, 8), CLASSES).parameters == sum(value.numel() for value in parameters.values())


CNN_PRE = ("none", "batch_norm", "rms_norm", "group_norm", "patch_norm", "patch_norm_affine")
CNN_POST = ("layer_norm", "rms_norm", "instance_norm")


@pytest.mark.parametrize(
    ("normaliser", "placement"), [*((name, "pre") for name in CNN_PRE), *((name, "post") for name in CNN_POST)]
)
def test_parameters_are_the_engines_of_a_cnn(normaliser, placement):
    """4 channels become 6, so that a gain per input and one per output differ in number."""
    trial = config(normaliser, kind="cnn", channels=[4, 6], placement=placement, gain=True)
    parameters = make_network(trial, (1, 8, 8), CLASSES).initial(0)
    assert sizes_of(trial, (1, 8, 8), CLASSES).parameters == sum(value.numel() for value in parameters.values())
