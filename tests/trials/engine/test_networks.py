"""Networks of lanes against ordinary modules, one per lane, with the same parameters."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trials.engine.plain import ACTIVATIONS, make_pack
from trials.engine.fused_mlp import initial_parameters
from trials.engine.networks import LaneNetwork, make_network, rate_factor
from trials.normalisers import DENSE as NORMALISERS
from trials.normalisers import FACTS
from trials.records import TrialConfig

F64 = torch.float64
SHAPE, CLASSES = (2, 2, 4), 3  # two channels
KINDS = ("mlp", "residual_mlp", "attention")
VARIANTS = [(name, "pre", gain) for name in NORMALISERS for gain in (False, True)]
VARIANTS += [(name, "post", gain) for name in NORMALISERS if FACTS[name].post for gain in (False, True)]


def make_config(model: str = "mlp", normaliser: str = "none", **changes) -> TrialConfig:
    attention = {"heads": 2, "patch": 2} if model == "attention" else {}
    config = make_pack([0], [0.1], normaliser=normaliser, depth=2, width=4).config
    return dataclasses.replace(config, **{"model": model, **attention, **changes})


class PlainMap(nn.Module):
    """An affine map on [samples, n] with PyTorch's own normalisers, where it has them."""

    def __init__(self, own: dict[str, Tensor], normaliser: str, placement: str, gain: bool):
        super().__init__()
        outputs, inputs = own["weight"].shape
        self.linear = nn.Linear(inputs, outputs, dtype=F64)
        self.normaliser, self.placement = normaliser, placement
        n = outputs if placement == "post" else inputs
        made = {
            "batch_norm": lambda: nn.BatchNorm1d(n, affine=gain, dtype=F64),
            "layer_norm": lambda: nn.LayerNorm(n, elementwise_affine=gain, dtype=F64),
            "rms_norm": lambda: nn.RMSNorm(n, eps=1e-5, elementwise_affine=gain, dtype=F64),
        }
        self.norm = made[normaliser]() if normaliser in made else None
        if self.norm is None and "gain" in own:
            self.gain = nn.Parameter(own["gain"])
        with torch.no_grad():
            for value, key in ((self.linear.weight, "weight"), (self.linear.bias, "bias")):
                value.copy_(own[key])
            for key, norms_name in (("gain", "weight"), ("shift", "bias")):
                if self.norm is not None and key in own:
                    getattr(self.norm, norms_name).copy_(own[key])

    def values(self) -> dict[str, Tensor]:
        """Parameters under the lane networks' names."""
        held: dict[str, Tensor] = {"weight": self.linear.weight, "bias": self.linear.bias}
        if self.norm is not None:
            held |= {{"weight": "gain", "bias": "shift"}[name]: value for name, value in self.norm.named_parameters()}
        return held | ({"gain": self.gain} if hasattr(self, "gain") else {})

    def forward(self, x: Tensor) -> Tensor:
        if self.placement == "post":
            return self.normalised(self.linear(x))
        if self.normaliser == "affine_like":
            z = self.linear(x) / (x.pow(2).sum(1, keepdim=True) + 1).sqrt()
            return z * self.gain if hasattr(self, "gain") else z
        if self.normaliser == "gradient_only":
            share = 1 / (x.detach().pow(2).sum(1, keepdim=True) + 1)
            frozen_weight, frozen_bias = self.linear.weight.detach(), self.linear.bias.detach()
            weighed = F.linear(x.detach() * share, self.linear.weight) + share * self.linear.bias
            return F.linear(x, frozen_weight, frozen_bias) + weighed - weighed.detach()
        return self.linear(self.normalised(x))

    def normalised(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            return self.norm(x)
        if self.normaliser in ("norm_like", "norm_like_half"):
            x = F.normalize(x, dim=1, eps=1e-30)
            return x * self.gain if hasattr(self, "gain") else x
        return x


class PlainNetwork(nn.Module):
    """One lane, written for its kind on samples [B, features]."""

    def __init__(self, config: TrialConfig, network: LaneNetwork, parameters: dict[str, Tensor]):
        super().__init__()
        self.config, self.activation = config, ACTIVATIONS[config.activation]
        self.maps: dict[str, PlainMap] = {}
        for name in network.affine_maps:
            own = {k.removeprefix(name + "."): v for k, v in parameters.items() if k.rpartition(".")[0] == name}
            plain = name == "head" and config.placement == "post"
            normaliser, placement = ("none", "pre") if plain else (config.normaliser, config.placement)
            self.maps[name] = PlainMap(own, normaliser, placement, config.gain)
        self.held = nn.ModuleList(self.maps.values())
        self.position = nn.Parameter(parameters["position"]) if "position" in parameters else None

    def values(self) -> dict[str, Tensor]:
        held = {f"{name}.{key}": value for name, one in self.maps.items() for key, value in one.values().items()}
        return held | ({} if self.position is None else {"position": self.position})

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.config.model)(x)

    def mlp(self, x: Tensor) -> Tensor:
        for index in range(self.config.depth):
            x = self.activation(self.maps[f"hidden{index + 1}"](x))
        return self.maps["head"](x)

    def residual_mlp(self, x: Tensor) -> Tensor:
        x = self.activation(self.maps["stem"](x))
        for index in range(self.config.depth):
            x = x + self.activation(self.maps[f"block{index + 1}"](x))
        return self.maps["head"](x)

    def attention(self, x: Tensor) -> Tensor:
        heads, patch = self.config.heads, self.config.patch
        assert heads is not None
        assert patch is not None
        assert self.position is not None
        side = (patch if SHAPE[1] > 1 else 1, patch)
        tokens = F.unfold(x.view(len(x), *SHAPE), side, stride=side).mT  # [B, T, C·patch²]

        def each(name: str, h: Tensor) -> Tensor:
            return self.maps[name](h.reshape(-1, h.shape[-1])).view(*h.shape[:-1], -1)

        h = each("embed", tokens) + self.position
        for index in range(self.config.depth):
            name = f"block{index + 1}"
            q, k, v = (each(f"{name}.{part}", h).chunk(heads, -1) for part in ("query", "key", "value"))
            mixed = [F.scaled_dot_product_attention(*qkv) for qkv in zip(q, k, v, strict=True)]
            h = h + each(f"{name}.output", torch.cat(mixed, -1))
            h = h + each(f"{name}.contract", self.activation(each(f"{name}.expand", h)))
        return self.maps["head"](h.mean(1))


def drawn_parameters(network: LaneNetwork, lanes: int) -> dict[str, Tensor]:
    """Parameters of `lanes` lanes, gains and shifts and all away from their start, [N, ...]."""
    generator = torch.Generator().manual_seed(5)
    drawn = {}
    for name, value in network.initial(3).items():
        noise = torch.randn(lanes, *value.shape, generator=generator, dtype=F64)
        drawn[name] = (value + 0.5 * noise).requires_grad_()
    return drawn


def drawn_buffers(network: LaneNetwork, lanes: int) -> dict[str, Tensor]:
    return {name: value.to(F64).repeat(lanes, 1) for name, value in network.buffers().items()}


def samples(*leading: int, features: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(*leading, features, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize(("normaliser", "placement", "gain"), VARIANTS)
def test_every_lane_is_the_plain_module_with_its_parameters(model: str, normaliser: str, placement: str, gain: bool):
    config = make_config(model, normaliser, placement=placement, gain=gain)
    network = make_network(config, SHAPE, CLASSES)
    groups, slots, batch = 2, 2, 5
    lanes = groups * slots
    parameters, buffers = drawn_parameters(network, lanes), drawn_buffers(network, lanes)
    plain = [
        PlainNetwork(config, network, {name: value[lane].detach().clone() for name, value in parameters.items()})
        for lane in range(lanes)
    ]
    inputs, into_logits = samples(groups, batch), samples(lanes, batch, features=CLASSES, seed=1)
    logits = network.forward(parameters, buffers, inputs, training=True)
    gradients = torch.autograd.grad(logits, list(parameters.values()), into_logits)
    for lane, module in enumerate(plain):
        expected = module(inputs[lane // slots])
        torch.testing.assert_close(logits[lane], expected)
        wanted = torch.autograd.grad(expected, list(module.values().values()), into_logits[lane])
        assert module.values().keys() == parameters.keys()
        by_name = dict(zip(module.values(), wanted, strict=True))
        for name, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(gradient[lane], by_name[name], msg=lambda m, n=name: f"{n}: {m}")
    held_out = samples(1, 7, seed=2)
    evaluated = network.forward(parameters, buffers, held_out, training=False)
    for lane, module in enumerate(plain):
        torch.testing.assert_close(evaluated[lane], module.eval()(held_out[0]))


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_lanes_together_are_the_lanes_alone(model: str, normaliser: str):
    network = make_network(make_config(model, normaliser, gain=True), SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network, 6), drawn_buffers(network, 6)
    inputs = samples(2, 5)
    together = network.forward(parameters, buffers, inputs, training=True)
    for lane in range(6):
        own = {name: value[lane : lane + 1] for name, value in parameters.items()}
        own_buffers = drawn_buffers(network, 1)
        alone = network.forward(own, own_buffers, inputs[lane // 3 : lane // 3 + 1], training=True)
        torch.testing.assert_close(together[lane], alone[0])
        for name, value in own_buffers.items():
            torch.testing.assert_close(buffers[name][lane], value[0])


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_a_lane_that_is_not_finite_leaves_the_others_alone(model: str, normaliser: str):
    network = make_network(make_config(model, normaliser, gain=True), SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network, 4), drawn_buffers(network, 4)
    inputs = samples(2, 5)
    values = list(parameters.values())

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


@pytest.mark.parametrize("normaliser", [name for name in NORMALISERS if name != "none"])
@pytest.mark.parametrize("training", [True, False])
def test_the_first_maps_input_is_never_copied_for_each_lane(normaliser: str, training: bool):
    features, batch, groups, slots = 64, 16, 2, 3
    network = make_network(make_config("mlp", normaliser, gain=True, depth=1), (1, 1, features), CLASSES)
    parameters, buffers = drawn_parameters(network, 6), drawn_buffers(network, 6)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, Tensor):
                    self.elements = max(self.elements, value.numel())
            return result

    with Largest() as largest:
        logits = network.forward(
            parameters, buffers, samples(groups if training else 1, batch, features=features), training=training
        )
        torch.autograd.grad(logits.sum(), list(parameters.values()))
    assert largest.elements < groups * slots * batch * features


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize(("normaliser", "placement"), sorted({(name, place) for name, place, _ in VARIANTS}))
@pytest.mark.parametrize("shared", [True, False])
def test_records_are_the_maps_inputs_and_outputs(model: str, normaliser: str, placement: str, shared: bool):
    """z is W u + b, and dL/dz gives dL/dW through u: what a probe is built on."""
    network = make_network(make_config(model, normaliser, placement=placement), SHAPE, CLASSES)
    lanes = 4 if shared else 2
    parameters, buffers = drawn_parameters(network, lanes), drawn_buffers(network, lanes)
    records: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def record(name: str, x: Tensor, u: Tensor, z: Tensor) -> None:
        records[name] = x, u, z

    logits = network.forward(parameters, buffers, samples(2, 5), training=True, record=record)
    assert tuple(records) == network.affine_maps
    outputs = [z for _, _, z in records.values()]
    weights = [parameters[f"{name}.weight"] for name in records]
    found = torch.autograd.grad(logits.pow(3).sum(), [*outputs, *weights])
    plain = network.forward(parameters, drawn_buffers(network, lanes), samples(2, 5), training=True)
    torch.testing.assert_close(logits, plain)
    for name, g, into_weight in zip(records, found[: len(outputs)], found[len(outputs) :], strict=True):
        x, u, z = (
            value.detach().repeat_interleave(lanes // len(value), 0) for value in records[name]
        )  # the first map's inputs are per group
        weight, bias = parameters[f"{name}.weight"].detach(), parameters[f"{name}.bias"].detach()
        assert x.shape == u.shape == (lanes, z.shape[1], weight.shape[2])
        squared = x.square().sum(-1, keepdim=True) + 1
        offset = bias[:, None] / squared.sqrt() if normaliser == "affine_like" else bias[:, None]
        torch.testing.assert_close(z, u @ weight.mT + offset)
        if normaliser == "gradient_only":
            g = g / squared
        torch.testing.assert_close(into_weight, g.mT @ u)


@pytest.mark.parametrize("normaliser", ["batch_norm", "layer_norm", "norm_like"])
@pytest.mark.parametrize("training", [True, False])
def test_a_record_with_gain_has_the_gain_in_u(normaliser: str, training: bool):
    network = make_network(make_config("mlp", normaliser, gain=True), SHAPE, CLASSES)
    parameters, buffers = drawn_parameters(network, 4), drawn_buffers(network, 4)

    def record(name: str, x: Tensor, u: Tensor, z: Tensor) -> None:
        torch.testing.assert_close(z, u @ parameters[f"{name}.weight"].mT + parameters[f"{name}.bias"][:, None])

    network.forward(parameters, buffers, samples(2 if training else 1, 5), training=training, record=record)


@pytest.mark.parametrize("model", KINDS)
def test_recorded_outputs_have_gradients_though_the_parameters_need_none(model: str):
    network = make_network(make_config(model), SHAPE, CLASSES)
    parameters = {name: value.detach() for name, value in drawn_parameters(network, 2).items()}
    outputs: list[Tensor] = []
    record = lambda name, x, u, z: outputs.append(z)  # noqa: E731
    logits = network.forward(parameters, {}, samples(1, 5), training=True, record=record)
    assert all(g.isfinite().all() for g in torch.autograd.grad(logits.sum(), outputs))


@pytest.mark.parametrize("model", KINDS)
def test_the_initial_draw_follows_the_seed_alone(model: str):
    reference = make_network(make_config(model), SHAPE, CLASSES).initial(7)
    for normaliser, placement, gain in VARIANTS:
        torch.manual_seed(gain)  # the global generator must not matter
        state = torch.get_rng_state()
        changed = make_config(model, normaliser, placement=placement, gain=gain, learning_rate=3.0, batch_size=9)
        got = make_network(changed, SHAPE, CLASSES).initial(7)
        assert torch.equal(torch.get_rng_state(), state)
        extra = got.keys() - reference.keys()
        assert {name.rpartition(".")[2] for name in extra} <= {"gain", "shift"}
        assert bool(extra) == (gain and normaliser not in ("none", "gradient_only"))
        for name, value in got.items():
            wanted = reference.get(name, torch.full_like(value, name.endswith("gain")))
            assert value.dtype == torch.float32
            assert torch.equal(value, wanted)
    other = make_network(make_config(model), SHAPE, CLASSES).initial(8)
    assert not any(torch.equal(other[name], value) for name, value in reference.items())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_mlp_starts_as_the_fast_path_does(depth: int):
    network = make_network(make_config(depth=depth), SHAPE, CLASSES)
    initial = network.initial(11)
    wanted = initial_parameters([16, *[4] * depth, CLASSES], 11)
    assert len(initial) == 2 * len(network.affine_maps) == 2 * (depth + 1)
    for name, (weight, bias) in zip(network.affine_maps, wanted, strict=True):
        assert torch.equal(initial[f"{name}.weight"], weight)
        assert torch.equal(initial[f"{name}.bias"], bias)


@pytest.mark.parametrize(("model", "depth"), [*itertools.product(KINDS, [0, 3])])
def test_weights_and_biases_are_within_the_bound_of_nn_linear(model: str, depth: int):
    network = make_network(make_config(model, depth=depth), SHAPE, CLASSES)
    initial = network.initial(0)
    for name in network.affine_maps:
        bound = initial[f"{name}.weight"].shape[1] ** -0.5
        for value in (initial[f"{name}.weight"], initial[f"{name}.bias"]):
            assert value.abs().max() <= bound
        assert initial[f"{name}.weight"].abs().max() > bound / 2
    logits = network.forward({k: v[None] for k, v in initial.items()}, {}, samples(1, 5).float(), training=False)
    assert logits.shape == (1, 5, CLASSES)


@pytest.mark.parametrize("shape", [(1, 1, 12), (3, 1, 12), (1, 12, 3), (2, 6, 9)])
def test_attention_cuts_a_sample_into_tokens_row_by_row(shape: tuple[int, int, int]):
    network = make_network(make_config("attention", depth=0, patch=3, width=2), shape, CLASSES)
    seen: list[Tensor] = []
    parameters = {name: value[None].double() for name, value in network.initial(0).items()}
    _, height, width = shape
    x = torch.arange(math.prod(shape), dtype=F64)[None, None]
    network.forward(parameters, {}, x, training=False, record=lambda name, x, u, z: seen.append(x))
    image = x.view(shape)
    tall = 3 if height > 1 else 1
    tokens = [
        image[:, top : top + tall, left : left + 3].flatten()
        for top in range(0, height, tall)
        for left in range(0, width, 3)
    ]
    assert torch.equal(seen[0][0], torch.stack(tokens))
    assert parameters["position"].shape[1] == len(tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "transformer"}, "'transformer'; known: mlp"),
        ({"activation": "softplus"}, "'softplus'; known: tanh"),
        ({"normaliser": "patch_norm"}, "'patch_norm' is not for a model of kind mlp; use none, batch_norm"),
        ({"normaliser": "affine_like", "placement": "post"}, "'post' has no meaning for normaliser 'affine_like'"),
        ({"normaliser": "norm_like_half", "placement": "post"}, "'post' has no meaning"),
        ({"placement": "middle"}, "'middle'; known: pre, post"),
        ({"model": "attention", "heads": 3, "patch": 2}, "width 4 is not a multiple of heads 3"),
        ({"model": "attention", "heads": 2, "patch": 4}, r"2 × 4 cannot be cut into patches of 4 × 4.*both sides"),
        ({"model": "attention", "heads": None}, "needs heads and patch"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_network(make_config(**changes), SHAPE, CLASSES)


def test_a_vector_that_patches_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"patches of 1 × 5.*the number of features"):
        make_network(make_config("attention", patch=5), (1, 1, 16), CLASSES)


def test_half_the_step_is_for_norm_like_half_alone():
    factors = {name: rate_factor(make_config(normaliser=name)) for name in NORMALISERS}
    assert factors == {name: 0.5 if name == "norm_like_half" else 1.0 for name in NORMALISERS}
