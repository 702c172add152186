"""The convolutional lane network against an ordinary module per lane, and lanes against each other."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trials.engine.plain import ACTIVATIONS, make_pack
from trials.engine.cnn import CNN
from trials.engine.networks import LaneNetwork, make_network
from trials.normalisers import CONVOLUTIONAL as NORMALISERS
from trials.normalisers import FACTS
from trials.records import TrialConfig

F64 = torch.float64
SHAPE, CLASSES = (2, 7, 6), 3
GROUPS, SLOTS, BATCH = 2, 2, 3
LANES = GROUPS * SLOTS
PATCH_NORMS = ("patch_norm", "patch_norm_affine")
DENSE_COUNTERPARTS = {
    "patch_norm": "norm_like",
    "patch_norm_affine": "affine_like",
    "group_norm": "layer_norm",
    "instance_norm": "layer_norm",
}
VARIANTS = [(name, "pre", gain) for name in NORMALISERS for gain in (False, True)]
VARIANTS += [(name, "post", gain) for name in NORMALISERS if FACTS[name].post for gain in (False, True)]
GEOMETRIES = [
    {"kernel": 1, "stride": 1, "pooling": "none"},
    {"kernel": 2, "stride": 1, "pooling": "max"},
    {"kernel": 3, "stride": 2, "pooling": "none"},
    {"kernel": 5, "stride": 1, "pooling": "average"},
]


def make_config(normaliser: str = "none", **changes) -> TrialConfig:
    config = make_pack([0], [0.1], normaliser=normaliser).config
    cnn = {"model": "cnn", "channels": (4, 6), "kernel": 3, "stride": 1, "pooling": "max"}
    return dataclasses.replace(config, **{**cnn, **changes})


def image_norm(name: str, shape: tuple[int, int, int], gain: bool) -> nn.Module:
    """PyTorch's normalisers where gains are per channel; the rest written out in `PlainMap`."""
    channels = shape[0]
    made = {
        "batch_norm": lambda: nn.BatchNorm2d(channels, affine=gain, dtype=F64),
        "layer_norm": lambda: nn.GroupNorm(1, channels, affine=gain, dtype=F64),
        "group_norm": lambda: nn.GroupNorm({1: 1, 2: 1, 3: 1, 4: 2, 6: 3}[channels], channels, affine=gain, dtype=F64),
        "instance_norm": lambda: nn.InstanceNorm2d(channels, affine=gain, dtype=F64),
    }
    return made.get(name, nn.Identity)()


def vector_norm(name: str, n: int, gain: bool) -> nn.Module:
    made = {
        "batch_norm": lambda: nn.BatchNorm1d(n, affine=gain, dtype=F64),
        "layer_norm": lambda: nn.LayerNorm(n, elementwise_affine=gain, dtype=F64),
    }
    return made.get(name, nn.Identity)()


class PlainMap(nn.Module):
    """A convolution or the head, with its normaliser, for one lane."""

    def __init__(self, own: dict[str, Tensor], config: TrialConfig, shape: tuple[int, int, int]):
        super().__init__()
        weight = own["weight"]
        self.dense = weight.dim() == 2
        self.name, self.post = config.normaliser, config.placement == "post"
        if self.dense:
            self.name = "none" if self.post else DENSE_COUNTERPARTS.get(self.name, self.name)
        kernel, stride = config.kernel or 1, config.stride or 1
        options = {"stride": stride, "padding": kernel // 2, "dtype": F64}
        own_gain = config.gain and self.name != "none"
        self.affine: nn.Module
        self.norm: nn.Module = nn.Identity()
        if self.dense:
            self.affine = nn.Linear(weight.shape[1], len(weight), dtype=F64)
            self.norm = vector_norm(self.name, weight.shape[1], config.gain)
        else:
            self.affine = nn.Conv2d(shape[0], len(weight), kernel, **options)
            normalised = (len(weight), 1, 1) if self.post else shape
            self.norm = image_norm(self.name, normalised, config.gain)
        self.gain = nn.Parameter(own["gain"]) if own_gain and "gain" in own and self._loose() else None
        with torch.no_grad():
            for key, value in self.values().items():
                value.copy_(own[key])

    def _loose(self) -> bool:
        return self.name in ("rms_norm", "norm_like", "affine_like", *PATCH_NORMS)

    def values(self) -> dict[str, Tensor]:
        """Parameters under the lane network's names."""
        held: dict[str, Tensor] = dict(self.affine.named_parameters())
        held |= {{"weight": "gain", "bias": "shift"}[name]: value for name, value in self.norm.named_parameters()}
        return held | ({} if self.gain is None else {"gain": self.gain})

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "affine_like":
            z = self.affine(x) / (x.square().sum(1, keepdim=True) + 1).sqrt()
            return z if self.gain is None else z * self.gain
        if self.name in PATCH_NORMS:
            return self._patch_normalised(x)
        return self._normalised(self.affine(x)) if self.post else self.affine(self._normalised(x))

    def _patch_normalised(self, x: Tensor) -> Tensor:
        """Every patch cut out and multiplied as a vector."""
        convolution = self.affine
        assert isinstance(convolution, nn.Conv2d)
        assert convolution.bias is not None
        kernel = convolution.kernel_size[0]
        patches = F.unfold(x, kernel, padding=kernel // 2, stride=convolution.stride).mT  # [B, positions, values]
        weight, bias = convolution.weight.flatten(1), convolution.bias
        gain = 1 if self.gain is None else self.gain
        if self.name == "patch_norm":
            z = gain * (F.normalize(patches, dim=-1, eps=1e-30) @ weight.T) + bias
        else:
            z = gain * (patches @ weight.T + bias) / (patches.square().sum(-1, keepdim=True) + 1).sqrt()
        return z.mT.unflatten(-1, convolution(x).shape[-2:])

    def _normalised(self, x: Tensor) -> Tensor:
        if self.name == "rms_norm":
            x = x / (x.square().flatten(1).mean(1) + 1e-5).sqrt().view(-1, *[1] * (x.dim() - 1))
        elif self.name == "norm_like":
            x = F.normalize(x, dim=1, eps=1e-30)
        else:
            return self.norm(x)
        return x if self.gain is None else x * self.gain.view(-1, *[1] * (x.dim() - 2))


class PlainNetwork(nn.Module):
    """One lane on samples [B, features]."""

    def __init__(self, config: TrialConfig, network: LaneNetwork, parameters: dict[str, Tensor]):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.pool = {"max": nn.MaxPool2d(2), "average": nn.AvgPool2d(2), "none": nn.Identity()}[config.pooling or ""]
        self.maps: dict[str, PlainMap] = {}
        channels = (SHAPE[0], *(config.channels or ()), 0)
        for name, incoming in zip(network.affine_maps, channels, strict=False):
            own = {k.removeprefix(name + "."): v for k, v in parameters.items() if k.startswith(name + ".")}
            self.maps[name] = PlainMap(own, config, (incoming, *SHAPE[1:]))
        self.held = nn.ModuleList(self.maps.values())

    def values(self) -> dict[str, Tensor]:
        return {f"{name}.{key}": value for name, one in self.maps.items() for key, value in one.values().items()}

    def forward(self, x: Tensor) -> Tensor:
        *convolutions, head = self.maps.values()
        x = x.view(-1, *SHAPE)
        for convolution in convolutions:
            x = self.pool(self.activation(convolution(x)))
        return head(x.flatten(1))


def drawn_parameters(network: LaneNetwork, lanes: int = LANES) -> dict[str, Tensor]:
    """Gains and shifts and all away from their start, [N, ...]."""
    generator = torch.Generator().manual_seed(5)
    drawn = {}
    for name, value in network.initial(3).items():
        noise = torch.randn(lanes, *value.shape, generator=generator, dtype=F64)
        drawn[name] = (value + 0.5 * noise).requires_grad_()
    return drawn


def drawn_buffers(network: LaneNetwork, lanes: int = LANES) -> dict[str, Tensor]:
    return {name: value.to(F64).repeat(lanes, 1) for name, value in network.buffers().items()}


def samples(*leading: int, features: int = math.prod(SHAPE), seed: int = 0) -> Tensor:
    return torch.randn(*leading, features, generator=torch.Generator().manual_seed(seed), dtype=F64)


def check_against_plain(config: TrialConfig) -> None:
    network = make_network(config, SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network), drawn_buffers(network)
    plain = [
        PlainNetwork(config, network, {name: value[lane].detach().clone() for name, value in parameters.items()})
        for lane in range(LANES)
    ]
    inputs, into_logits = samples(GROUPS, BATCH), samples(LANES, BATCH, features=CLASSES, seed=1)
    logits = network.forward(parameters, buffers, inputs, training=True)
    gradients = torch.autograd.grad(logits, list(parameters.values()), into_logits)
    for lane, module in enumerate(plain):
        expected = module(inputs[lane // SLOTS])
        torch.testing.assert_close(logits[lane], expected)
        assert module.values().keys() == parameters.keys()
        wanted = torch.autograd.grad(expected, list(module.values().values()), into_logits[lane])
        by_name = dict(zip(module.values(), wanted, strict=True))
        for name, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(gradient[lane], by_name[name], msg=lambda m, n=name: f"{n}: {m}")
    held_out = samples(1, 4, seed=2)
    evaluated = network.forward(parameters, buffers, held_out, training=False)
    for lane, module in enumerate(plain):
        torch.testing.assert_close(evaluated[lane], module.eval()(held_out[0]))


@pytest.mark.parametrize(("normaliser", "placement", "gain"), VARIANTS)
def test_every_lane_is_the_plain_module_with_its_parameters(normaliser: str, placement: str, gain: bool):
    check_against_plain(make_config(normaliser, placement=placement, gain=gain))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("normaliser", ["group_norm", "patch_norm", "patch_norm_affine"])
def test_any_geometry_is_the_plain_modules(geometry: dict, normaliser: str):
    check_against_plain(make_config(normaliser, activation="relu", gain=True, **geometry))


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_lanes_together_are_the_lanes_alone(normaliser: str):
    network = make_network(make_config(normaliser, gain=True), SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network, 6), drawn_buffers(network, 6)
    inputs = samples(2, BATCH)
    together = network.forward(parameters, buffers, inputs, training=True)
    for lane in range(6):
        own = {name: value[lane : lane + 1] for name, value in parameters.items()}
        own_buffers = drawn_buffers(network, 1)
        alone = network.forward(own, own_buffers, inputs[lane // 3 : lane // 3 + 1], training=True)
        torch.testing.assert_close(together[lane], alone[0])
        for name, value in own_buffers.items():
            torch.testing.assert_close(buffers[name][lane], value[0])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_a_lane_that_is_not_finite_leaves_the_others_alone(normaliser: str, dtype: torch.dtype):
    network = make_network(make_config(normaliser, gain=True), SHAPE, CLASSES)
    parameters = {name: value.detach().to(dtype).requires_grad_() for name, value in drawn_parameters(network).items()}
    buffers = {name: value.to(dtype) for name, value in drawn_buffers(network).items()}
    inputs, values = samples(GROUPS, BATCH).to(dtype), list(parameters.values())

    def run() -> list[Tensor]:
        own = {name: value.clone() for name, value in buffers.items()}
        losses = network.forward(parameters, own, inputs, training=True).square().sum((1, 2))
        gradients = torch.autograd.grad(losses, values, torch.ones_like(losses))
        return [losses, *gradients, *own.values(), network.forward(parameters, own, inputs[:1], training=False)]

    healthy = run()
    with torch.no_grad():
        for value in values:
            value[1] = torch.nan
    others = [0, 2, 3]
    for before, after in zip(healthy, run(), strict=True):
        assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("normaliser", "placement"), sorted({(name, place) for name, place, _ in VARIANTS}))
def test_records_are_the_maps_patches_and_outputs(normaliser: str, placement: str, training: bool, gain: bool):
    """z is W u + b row by row, and dL/dz gives dL/dW through u: what a probe is built on."""
    network = make_network(make_config(normaliser, placement=placement, gain=gain), SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network), drawn_buffers(network)
    inputs = samples(GROUPS if training else 1, BATCH)
    records: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def record(name: str, x: Tensor, u: Tensor, z: Tensor) -> None:
        records[name] = x, u, z

    logits = network.forward(parameters, buffers, inputs, training=training, record=record)
    assert tuple(records) == network.affine_maps == ("conv1", "conv2", "head")
    plain = network.forward(parameters, drawn_buffers(network), inputs, training=training)
    if training or normaliser != "batch_norm":
        torch.testing.assert_close(logits, plain)
    found = torch.autograd.grad(logits.pow(3).sum(), [z for _, _, z in records.values()], retain_graph=True)
    torch.testing.assert_close(
        records["conv1"][0][0], F.unfold(inputs[0].view(-1, *SHAPE), 3, padding=1).mT.flatten(0, 1)
    )
    for (name, (x, u, z)), g in zip(records.items(), found, strict=True):
        x, u = (value.detach().repeat_interleave(LANES // len(value), 0) for value in (x, u))
        assert x.shape == u.shape
        assert z.shape[:2] == u.shape[:2]
        weight, bias = parameters[f"{name}.weight"].detach().flatten(2), parameters[f"{name}.bias"].detach()[:, None]
        scale = parameters[f"{name}.gain"].detach()[:, None] if gain and f"{name}.gain" in parameters else 1.0
        if normaliser == "patch_norm_affine":
            lengths = (x.square().sum(-1, keepdim=True) + 1).sqrt()
            torch.testing.assert_close(u, x / lengths)
            expected, into_weight = scale * (u @ weight.mT + bias / lengths), (g * scale).mT @ u
        elif normaliser == "patch_norm" and name != "head":
            torch.testing.assert_close(u, F.normalize(x, dim=-1, eps=1e-30))
            expected, into_weight = scale * (u @ weight.mT) + bias, (g * scale).mT @ u
        else:
            expected, into_weight = u @ weight.mT + bias, g.mT @ u
        torch.testing.assert_close(z, expected)
        (wanted,) = torch.autograd.grad(logits.pow(3).sum(), parameters[f"{name}.weight"], retain_graph=True)
        torch.testing.assert_close(into_weight, wanted.flatten(2))


def test_records_without_a_graph_begin_one():
    network = make_network(make_config(), SHAPE, CLASSES)
    parameters = {name: value.detach() for name, value in drawn_parameters(network).items()}
    outputs: list[Tensor] = []
    logits = network.forward(
        parameters, {}, samples(GROUPS, BATCH), training=True, record=lambda name, x, u, z: outputs.append(z)
    )
    assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(logits.square().sum(), outputs))


def test_initial_values_are_nn_conv2ds_and_the_same_for_every_arm():
    """Same distribution as PyTorch's own, from the seed alone, in forward order."""
    values = make_network(make_config(), SHAPE, CLASSES).initial(4)
    generator = torch.Generator().manual_seed(4)
    fan_ins = {"conv1": 2 * 9, "conv2": 4 * 9, "head": 6}
    assert list(values) == [f"{name}.{kind}" for name in fan_ins for kind in ("weight", "bias")]
    for name, value in values.items():
        expected = (2 * torch.rand(value.shape, generator=generator) - 1) / math.sqrt(fan_ins[name.split(".")[0]])
        torch.testing.assert_close(value, expected)
    for normaliser, placement, gain in VARIANTS:
        arm = make_network(make_config(normaliser, placement=placement, gain=gain), SHAPE, CLASSES)
        drawn = arm.initial(4)
        assert all(torch.equal(drawn[name], value) for name, value in values.items())
        for name in drawn.keys() - values.keys():
            assert drawn[name].eq(1.0 if name.endswith("gain") else 0.0).all()
    assert not torch.equal(
        make_network(make_config(), SHAPE, CLASSES).initial(5)["conv1.weight"], values["conv1.weight"]
    )


def test_a_network_without_convolutions_is_its_head():
    network = make_network(make_config("patch_norm", channels=()), SHAPE, CLASSES)
    parameters, inputs = drawn_parameters(network), samples(GROUPS, BATCH)
    assert network.affine_maps == ("head",)
    logits = network.forward(parameters, {}, inputs, training=True)
    expected = F.normalize(inputs[1], dim=-1) @ parameters["head.weight"][2].T + parameters["head.bias"][2]
    torch.testing.assert_close(logits[2], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normaliser": "norm_like"}, "normaliser 'norm_like' is not for a model of kind cnn; use none, batch_norm"),
        ({"normaliser": "patch_norm", "placement": "post"}, "placement 'post' has no meaning for normaliser"),
        ({"pooling": "median"}, "unknown pooling 'median'; known: max, average, none"),
        ({"channels": None}, "a cnn needs channels, kernel, stride and pooling"),
        ({"kernel": None}, "a cnn needs channels, kernel, stride and pooling"),
        ({"channels": (2, 2, 2)}, "7 × 6 are too small: pooling leaves nothing after layer 3"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        CNN(make_config(**changes), SHAPE, CLASSES)
