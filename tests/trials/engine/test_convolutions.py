"""Normalised convolutions by three roads: patches one by one, finite differences, and what the paper says stays."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.gradcheck import gradcheck

from trials.engine.convolutions import (
    PatchNormAffineConv2d,
    PatchNormConv2d,
    batch_norm,
    groups_of,
    normalise,
    patch_norm,
    patch_norm_affine,
    patch_squared_norms,
)

F64 = torch.float64
FUNCTIONS: dict[str, Any] = {"patch_norm": patch_norm, "patch_norm_affine": patch_norm_affine}
LAYERS: tuple[Any, ...] = (PatchNormConv2d, PatchNormAffineConv2d)
GEOMETRIES: list[dict[str, int]] = [
    {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    {"stride": 2, "padding": 1, "dilation": 1, "groups": 2},
    {"stride": 1, "padding": 2, "dilation": 2, "groups": 1},
]


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def formula(name: str, w: Tensor, patch: Tensor, b: Tensor | float, gain: Tensor | float) -> Tensor:
    """One output at one position, from a patch and one kernel."""
    squared = (patch * patch).sum()
    if name == "patch_norm":
        return (gain * (w * patch).sum() / squared.sqrt() if squared > 0 else 0 * patch.sum()) + b
    return gain * ((w * patch).sum() + b) / (squared + 1).sqrt()


def position_by_position(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    *,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
) -> Tensor:
    """The formulas with a loop for every axis."""
    padded = F.pad(x, [padding] * 4)
    outputs, channels, height, width = weight.shape
    reach = (height - 1) * dilation + 1, (width - 1) * dilation + 1
    images = []
    for image in padded:
        maps = []
        for out in range(outputs):
            first = out // (outputs // groups) * channels
            rows = []
            for top in range(0, image.shape[1] - reach[0] + 1, stride):
                row = []
                for left in range(0, image.shape[2] - reach[1] + 1, stride):
                    patch = image[
                        first : first + channels, top : top + reach[0] : dilation, left : left + reach[1] : dilation
                    ]
                    b, factor = 0.0 if bias is None else bias[out], 1.0 if gain is None else gain[out]
                    row.append(formula(name, weight[out], patch, b, factor))
                rows.append(torch.stack(row))
            maps.append(torch.stack(rows))
        images.append(torch.stack(maps))
    return torch.stack(images)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("with_gain", [False, True])
def test_outputs_and_gradients_are_the_formula_position_by_position(name: str, geometry: dict, with_gain: bool):
    x, weight, bias, gain = draw((2, 2, 4, 5), (2, 2 // geometry["groups"], 3, 2), (2,), (2,))
    leaves = [value.requires_grad_() for value in (x, weight, bias, *([gain] if with_gain else []))]
    expected = position_by_position(name, x, weight, bias, gain if with_gain else None, **geometry)
    z = FUNCTIONS[name](*leaves, **geometry)
    torch.testing.assert_close(z, expected)
    (into_z,) = draw(tuple(z.shape), seed=1)
    wanted = torch.autograd.grad(expected, leaves, into_z)
    for got, gradient in zip(torch.autograd.grad(z, leaves, into_z), wanted, strict=True):
        torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=str)
def test_gradients_pass_gradcheck(name: str, geometry: dict):
    x, weight, bias, gain = draw((2, 2, 4, 3), (2, 2 // geometry["groups"], 2, 2), (2,), (2,))
    leaves = [value.requires_grad_() for value in (x, weight, bias, gain)]
    assert gradcheck(lambda *given: FUNCTIONS[name](*given, **geometry), leaves)


@given(
    sides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.integers(1, 3),
    channels=st.integers(1, 2),
    outputs=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_any_geometry_is_that_of_unfold(sides, stride, padding, dilation, groups, channels, outputs, seed):
    x, weight, bias = draw(
        (2, groups * channels, 6, 7), (groups * outputs, channels, *sides), (groups * outputs,), seed=seed
    )
    geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
    shape = F.conv2d(x, weight, bias, **geometry, groups=groups).shape
    columns = F.unfold(x, sides, **geometry).unflatten(1, (groups, -1))  # [B, groups, values, positions]
    squares = columns.square().sum(2)
    torch.testing.assert_close(
        patch_squared_norms(x, sides, **geometry, groups=groups), squares.view(2, groups, *shape[2:])
    )
    products = torch.einsum("gov,bgvp->bgop", weight.view(groups, outputs, -1), columns)
    lengths, b = squares.sqrt().unsqueeze(2), bias.view(groups, outputs, 1)
    expected = {
        patch_norm: torch.where(lengths > 0, products / lengths, 0) + b,
        patch_norm_affine: (products + b) / (squares + 1).sqrt().unsqueeze(2),
    }
    for function, values in expected.items():
        torch.testing.assert_close(function(x, weight, bias, **geometry, groups=groups), values.reshape(shape))


@pytest.mark.parametrize(
    ("name", "multiple"),
    [("patch_norm", lambda s: 2.0), ("patch_norm_affine", lambda s: 1.0), ("none", lambda s: s + 1)],
)
@given(seed=st.integers(0, 2**31), size=st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_one_step_moves_an_only_output_by_the_papers_multiple_of_the_gradient(name, multiple, seed, size):
    """One position, so that no other patch shares the kernels; exact, as z is affine in W and b."""
    x, weight, bias, target = draw((1, 2, 3, 3), (4, 2, 3, 3), (4,), (1, 4, 1, 1), seed=seed)
    function = FUNCTIONS.get(name, F.conv2d)
    x = x * size
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    before = function(x, *leaves)
    steps = torch.autograd.grad((before - target).square().sum() / 2, leaves)
    after = function(x, *(leaf - 1e-3 * step for leaf, step in zip(leaves, steps, strict=True)))
    g = (before - target).detach()
    torch.testing.assert_close(
        (after - before).detach(), -1e-3 * multiple(float(x.square().sum())) * g, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_rescaled_image_gives_a_patch_norm(name: str):
    """Compositionally inseparable: what an output has of a pixel depends on the patch, not on the pixel alone.

    Kernels that each pick out one place of a patch give the pixel as the patch holds it. A normaliser of the
    image would give it one value, wherever in the patch it lies.
    """
    (x,) = draw((1, 1, 5, 5))
    picking = torch.eye(9, dtype=F64).view(9, 1, 3, 3)
    z = FUNCTIONS[name](x, picking)
    held = torch.stack(
        [z[0, 3 * i + j, 2 - i, 2 - j] for i in range(3) for j in range(3)]
    )  # the middle pixel, by patch
    assert len({round(float(value / x[0, 0, 2, 2]), 6) for value in held}) == 9
    # The same measure finds one value where a normaliser is composed with the convolution.
    z = F.conv2d(normalise("layer_norm", x), picking)
    held = torch.stack([z[0, 3 * i + j, 2 - i, 2 - j] for i in range(3) for j in range(3)])
    torch.testing.assert_close(held, held[:1].expand(9))


def test_patch_norm_does_not_feel_the_scale_and_patch_norm_affine_does():
    x, weight, bias = draw((1, 2, 4, 4), (3, 2, 3, 3), (3,))
    torch.testing.assert_close(patch_norm(1000 * x, weight, bias), patch_norm(x, weight, bias))
    assert (patch_norm_affine(1000 * x, weight, bias) - patch_norm_affine(x, weight, bias)).abs().max() > 0.1


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_zero_patches_are_finite_and_leave_the_others_their_gradients(name: str, dtype: torch.dtype):
    x, weight, bias = (value.to(dtype) for value in draw((1, 1, 3, 6), (2, 1, 3, 3), (2,)))
    x[..., :3] = 0  # the first patch has nothing, the others have
    leaves = [value.requires_grad_() for value in (x, weight, bias)]
    z = FUNCTIONS[name](*leaves)
    assert torch.equal(z[0, :, 0, 0], bias)
    gradients = torch.autograd.grad(z.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    if name == "patch_norm":
        assert gradients[0][..., 0].eq(0).all()  # in the zero patch alone
    elsewhere = FUNCTIONS[name](x[..., 1:], weight, bias)
    wanted = torch.autograd.grad(elsewhere.square().sum(), [x, weight])
    if name == "patch_norm":
        torch.testing.assert_close(gradients[:2], wanted)
    (alone,) = torch.autograd.grad(patch_norm(torch.zeros_like(x).requires_grad_(), weight, bias).sum(), [weight])
    assert alone.eq(0).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-18, 1e-13, 1e-6, 1.0, 1e12])
def test_the_gradient_of_a_patch_norm_goes_with_one_over_the_length_however_short(size: float):
    x, weight, bias, into_z = draw((1, 2, 4, 4), (3, 2, 3, 3), (3,), (1, 3, 4, 4))
    short, kernels = (size * x).float().requires_grad_(), weight.float().requires_grad_()
    expected = patch_norm(x.requires_grad_(), weight.requires_grad_(), bias, padding=1)
    wanted = torch.autograd.grad(expected, [x, weight], into_z)
    z = patch_norm(short, kernels, bias.float(), padding=1)
    into_x, into_weight = torch.autograd.grad(z, [short, kernels], into_z.float())
    if size < 1e-19:  # in float32 the squares are as good as nothing
        assert torch.equal(z, bias.float()[:, None, None].expand(z.shape))
        assert not into_x.any()
        assert not into_weight.any()
        return
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(into_weight.double(), wanted[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(into_x.double() * size, wanted[0], rtol=1e-4, atol=1e-5)


CLASSICAL = {
    "none": nn.Identity(),
    "layer_norm": nn.LayerNorm([6, 3, 4], elementwise_affine=False, dtype=F64),
    "rms_norm": nn.RMSNorm([6, 3, 4], eps=1e-5, elementwise_affine=False),
    "group_norm": nn.GroupNorm(3, 6, affine=False),
    "instance_norm": nn.InstanceNorm2d(6),
}


@pytest.mark.parametrize("name", CLASSICAL)
def test_normalisers_are_pytorchs_for_any_leading_axes(name: str):
    (x,) = draw((5, 2, 6, 3, 4))
    x = (3 * x + 1).requires_grad_()
    u = normalise(name, x)
    for lane in range(2):
        torch.testing.assert_close(u[:, lane], CLASSICAL[name](x[:, lane]))
    assert gradcheck(lambda x: normalise(name, x), x[:1, :, :, :2, :2].detach().requires_grad_())


def test_other_names_are_refused():
    for name in ("patch_norm", "batch_norm", "norm_like"):
        with pytest.raises(ValueError, match="use none, layer_norm"):
            normalise(name, torch.zeros(1, 1, 2, 2))


def test_group_norm_has_at_most_four_groups_of_equal_size_and_two_channels():
    assert [groups_of(channels) for channels in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)] == [1, 1, 1, 2, 1, 3, 1, 4, 3, 4]


@pytest.mark.parametrize("slots", [1, 3])
def test_batch_norm_and_its_running_statistics_are_pytorchs(slots: int):
    """Two groups of lanes; each of a group's lanes keeps statistics of its own."""
    mean, variance = draw((2 * slots, 3), (2 * slots, 3))
    variance = variance.square()
    modules = [nn.BatchNorm2d(3, affine=False, dtype=F64) for _ in range(2 * slots)]
    for lane, module in enumerate(modules):
        assert module.running_mean is not None
        assert module.running_var is not None
        module.running_mean.copy_(mean[lane])
        module.running_var.copy_(variance[lane])
    for step in range(2):
        (x,) = draw((4, 2, 3, 2, 3), seed=step)
        x = (2 * x + 1).requires_grad_()
        u = batch_norm(x, mean, variance)
        for lane, module in enumerate(modules):
            torch.testing.assert_close(u[:, lane // slots], module(x[:, lane // slots]))
            torch.testing.assert_close(mean[lane], module.running_mean)
            torch.testing.assert_close(variance[lane], module.running_var)
    assert gradcheck(batch_norm, draw((3, 2, 2, 1, 2))[0].requires_grad_())


def test_batch_norm_of_a_single_value_is_zero():
    mean, variance = torch.zeros(1, 2, dtype=F64), torch.ones(1, 2, dtype=F64)
    u = batch_norm(torch.full((1, 1, 2, 1, 1), 3.0, dtype=F64), mean, variance)
    torch.testing.assert_close(u, torch.zeros_like(u), rtol=0, atol=1e-10)
    torch.testing.assert_close(mean, torch.full_like(mean, 0.3))
    torch.testing.assert_close(variance, torch.full_like(variance, 0.9))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "same", "kernel_size": (2, 3), "dilation": 2},
        {"stride": (2, 1), "padding": (1, 0), "groups": 2, "gain": True},
        {"bias": False, "padding": "valid"},
    ],
    ids=str,
)
def test_layers_have_nn_conv2ds_arguments_and_shapes(layer: Any, options: dict[str, Any]):
    given = {"kernel_size": 3, "dtype": F64, **options}
    made = layer(4, 6, **given)
    given.pop("gain", None)
    plain = nn.Conv2d(4, 6, **given)
    plain.load_state_dict({name: value for name, value in made.state_dict().items() if name != "gain"})
    for shape in ((3, 4, 7, 6), (4, 7, 6)):
        (x,) = draw(shape)
        products = plain(x) if plain.bias is None else plain(x) - plain.bias[:, None, None]
        ones = nn.Conv2d(4, 6, **{**given, "bias": False})
        nn.init.ones_(ones.weight)
        squares = ones(x.square())
        b = 0 if plain.bias is None else plain.bias[:, None, None]
        expected = products / squares.sqrt() + b if layer is PatchNormConv2d else (products + b) / (squares + 1).sqrt()
        torch.testing.assert_close(made(x), expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_gain_scales_each_channel_and_is_reset_to_one(layer: Any):
    made, (x,) = layer(2, 3, 3, dtype=F64, gain=True), draw((2, 2, 4, 4))
    assert made.gain.shape == (3,)
    before = made(x)
    with torch.no_grad():
        made.gain.copy_(torch.tensor([2.0, -1.0, 0.0]))
    b = made.bias[:, None, None] if layer is PatchNormConv2d else 0
    torch.testing.assert_close(made(x) - b, (before - b) * made.gain[:, None, None])
    made.reset_parameters()
    assert made.gain.eq(1).all()
    assert "gain=True" in repr(made)
    assert [name for name, _ in layer(2, 3, 3).named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("layer", LAYERS)
def test_initialisation_and_state_are_those_of_nn_conv2d(layer: Any):
    torch.manual_seed(2)
    reference = nn.Conv2d(2, 3, 3)
    torch.manual_seed(2)
    made = layer(2, 3, 3, gain=True)
    for name, value in reference.named_parameters():
        assert torch.equal(getattr(made, name), value)
    layer(2, 3, 3).load_state_dict(reference.state_dict())  # strict


@pytest.mark.parametrize("layer", LAYERS)
def test_state_goes_round(layer: Any):
    made, other = layer(2, 3, 3, gain=True), layer(2, 3, 3, gain=True)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 2, 5, 5)
    assert torch.equal(made(x), other(x))
    assert torch.equal(made(x), copy.deepcopy(made)(x))


@pytest.mark.parametrize("layer", LAYERS)
def test_other_padding_modes_are_refused(layer: Any):
    with pytest.raises(ValueError, match="zeros only, not padding_mode 'reflect'; pad the input"):
        layer(2, 3, 3, padding=1, padding_mode="reflect")


@pytest.mark.parametrize("layer", LAYERS)
def test_half_precision_does_not_overflow(layer: Any):
    """Values of 300 have squares that float16 does not hold, whether cast or under autocast."""
    made = layer(2, 3, 3)
    x = 300 * torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)).half().float()
    expected = made(x)
    with torch.autocast("cpu", dtype=torch.float16):
        z = made(x)
    assert z.dtype == torch.float16
    torch.testing.assert_close(z.float(), expected, rtol=0.01, atol=0.01)
    torch.testing.assert_close(made.half()(x.half()).float(), expected, rtol=0.01, atol=0.01)
