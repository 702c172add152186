"""The dense maps by three roads: plain PyTorch, finite differences, and what the paper says they leave unchanged."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

from trials.engine.functional import affine, batch_norm, normalise, running_scale, scaled
from trials.normalisers import DENSE as NORMALISERS

F64 = torch.float64
LANES = [(), (3,), (2, 3)]


def draw(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def plain(name: str, x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """The formulas as SCIENCE writes them, for one lane and sample by sample, but for batch_norm's statistics."""
    mean, variance = x.mean(0), x.var(0, unbiased=False)
    rows = []
    for row in x:
        if name == "batch_norm":
            u = (row - mean) / torch.sqrt(variance + 1e-5)
        elif name == "layer_norm":
            u = (row - row.mean()) / torch.sqrt(row.var(unbiased=False) + 1e-5)
        elif name == "rms_norm":
            u = row / torch.sqrt((row * row).mean() + 1e-5)
        elif name in ("norm_like", "norm_like_half"):
            u = row / torch.sqrt(row @ row)
        else:
            u = row
        if name == "affine_like":
            z = (weight @ row + bias) / torch.sqrt(row @ row + 1)
            rows.append(z if gain is None else gain * z)
            continue
        if gain is not None:
            u = u * gain
        if shift is not None:
            u = u + shift
        rows.append(weight @ u + bias)
    return torch.stack(rows)


def has_gain(name: str) -> bool:
    return name not in ("none", "gradient_only")


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("with_gain", [False, True])
def test_output_and_gradients_equal_the_written_formula(name: str, lanes: tuple[int, ...], with_gain: bool):
    x, weight, bias, into_z = draw((*lanes, 5, 7), (*lanes, 4, 7), (*lanes, 4), (*lanes, 5, 4))
    leaves = {"x": 2 * x + 0.5, "weight": weight, "bias": bias}
    if with_gain and has_gain(name):
        leaves["gain"], leaves["shift"] = draw((*lanes, 4 if name == "affine_like" else 7), (*lanes, 7), seed=1)
        if name == "affine_like":
            del leaves["shift"]
    leaves = {key: value.requires_grad_() for key, value in leaves.items()}
    z = affine(name, *leaves.values())
    gradients = torch.autograd.grad(z, list(leaves.values()), into_z)
    for index in itertools.product(*map(range, lanes)):
        one = {key: value.detach()[index].clone().requires_grad_() for key, value in leaves.items()}
        expected = plain(name, **{"gain": None, "shift": None, **one})
        torch.testing.assert_close(z[index], expected)
        wanted = dict(zip(one, torch.autograd.grad(expected, list(one.values()), into_z[index]), strict=True))
        if name == "gradient_only":
            weighed = into_z[index] / (one["x"].detach() ** 2).sum(1, keepdim=True).add(1)
            wanted["weight"] = torch.einsum("bo,bn->on", weighed, one["x"].detach())
            wanted["bias"] = weighed.sum(0)
        for got, key in zip(gradients, leaves, strict=True):
            torch.testing.assert_close(got[index], wanted[key], msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", [name for name in NORMALISERS if name != "gradient_only"])
def test_gradients_pass_gradcheck(name: str):
    x, weight, bias, gain = draw((2, 3, 4), (2, 3, 4), (2, 3), (2, 3 if name == "affine_like" else 4))
    leaves = [value.requires_grad_() for value in (x, weight, bias, *([gain] if has_gain(name) else []))]
    assert gradcheck(lambda *given: affine(name, *given), leaves)


def test_gradient_only_passes_gradcheck_for_its_input_alone():
    x, weight, bias = draw((2, 3, 4), (2, 3, 4), (2, 3))
    assert gradcheck(lambda x: affine("gradient_only", x, weight, bias), x.requires_grad_())
    with pytest.raises(GradcheckError):
        gradcheck(lambda w: affine("gradient_only", x.detach(), w, bias), weight.requires_grad_())


@pytest.mark.parametrize("name", NORMALISERS)
def test_a_map_without_bias_has_the_bias_zero(name: str):
    x, weight = draw((3, 5, 7), (3, 4, 7))
    torch.testing.assert_close(affine(name, x, weight), affine(name, x, weight, torch.zeros(3, 4, dtype=F64)))


@pytest.mark.parametrize(
    ("name", "multiple"),
    [
        ("affine_like", lambda x: 1.0),
        ("gradient_only", lambda x: 1.0),
        ("norm_like", lambda x: 2.0),
        ("none", lambda x: 1.0 + float(x.square().sum())),
    ],
)
@given(seed=st.integers(0, 2**31), size=st.floats(0.01, 100), rate=st.floats(1e-4, 10))
@settings(max_examples=25, deadline=None)
def test_one_step_moves_the_output_by_the_papers_multiple_of_the_gradient(name, multiple, seed, size, rate):
    """One sample, one step of plain gradient descent: exact, not to first order, as z is affine in W and b."""
    x, weight, bias, target = draw((1, 7), (4, 7), (4,), (1, 4), seed=seed)
    x = x * size
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    before = affine(name, x, *leaves)
    loss = ((before - target) ** 4).sum() / 4
    g = (before - target).detach() ** 3
    steps = torch.autograd.grad(loss, leaves)
    after = affine(name, x, *(leaf - rate * step for leaf, step in zip(leaves, steps, strict=True)))
    moved = (after - before).detach()
    scale = float(moved.abs().max() + before.detach().abs().max())
    torch.testing.assert_close(moved, -multiple(x) * rate * g, rtol=1e-7, atol=1e-12 * scale)


@pytest.mark.parametrize("name", NORMALISERS)
@given(seed=st.integers(0, 2**31), factor=st.floats(0.1, 10).filter(lambda c: abs(c - 1) > 0.05))
@settings(max_examples=15, deadline=None)
def test_scale_invariance_where_there_is_one_and_only_there(name: str, seed: int, factor: float):
    x, weight, bias = draw((6, 7), (4, 7), (4,), seed=seed)
    x = x * 1e3  # eps no longer matters
    one, other = affine(name, x, weight, bias), affine(name, factor * x, weight, bias)
    if name in ("batch_norm", "layer_norm", "rms_norm", "norm_like", "norm_like_half"):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    elif name == "affine_like":  # the length is kept, though hardly so where it is great
        near = affine(name, x / 1e3, weight, bias)
        assert not torch.allclose(near, affine(name, factor * x / 1e3, weight, bias), rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(other - bias, factor * (one - bias))


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12])
def test_zero_tiny_and_huge_inputs_give_finite_values_and_gradients(name: str, size: float):
    x, weight, bias, into_z = draw((2, 4, 5), (2, 3, 5), (2, 3), (2, 4, 3), dtype=torch.float32)
    x *= size
    x[0, 1] = 0
    x[1] = 0
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    z = affine(name, *leaves)
    assert z.isfinite().all()
    into = torch.autograd.grad(z, leaves, into_z)
    assert into[1].isfinite().all()
    assert into[2].isfinite().all()
    assert into[0].isfinite().all()
    if name.startswith("norm_like"):
        torch.testing.assert_close(z[1], bias[1].detach().expand(4, 3))
        assert not into[0][1].any()
        assert not into[0][0, 1].any()


@pytest.mark.parametrize("name", [name for name in NORMALISERS if name != "batch_norm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_squares_do_not_overflow(name: str, dtype: torch.dtype):
    x, weight, bias = draw((4, 50), (3, 50), (3,), dtype=torch.float32)
    leaves = [(100 * x).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()]
    z = affine(name, *leaves)
    wide = affine(name, *(leaf.detach().float() for leaf in leaves))
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), wide, rtol=0.05, atol=0.05)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(z.float().sum(), leaves))


@pytest.mark.parametrize("name", NORMALISERS)
def test_normalise_returns_what_the_weights_multiply(name: str):
    x, weight = draw((2, 5, 7), (2, 4, 7))
    torch.testing.assert_close(normalise(name, x) @ weight.mT, affine(name, x, weight))


def test_the_lengths_are_those_of_the_papers_geometry():
    (x,) = draw((1000, 2))
    lengths = {name: normalise(name, x).norm(dim=1) for name in ("norm_like", "rms_norm", "affine_like", "layer_norm")}
    torch.testing.assert_close(lengths["norm_like"], torch.ones(1000, dtype=F64))
    assert (lengths["rms_norm"] - 2**0.5).abs().quantile(0.9) < 1e-3
    assert lengths["affine_like"].max() < 1
    assert lengths["affine_like"].std() > 0.1
    collapsed = normalise("layer_norm", x)  # two points
    torch.testing.assert_close(collapsed[:, 0], -collapsed[:, 1])
    assert (collapsed.abs() - 1).abs().median() < 1e-3


@pytest.mark.parametrize("samples", [2, 8])
def test_running_statistics_are_those_of_nn_batch_norm(samples: int):
    modules = [nn.BatchNorm1d(5, affine=False, dtype=F64) for _ in range(3)]
    mean, variance = torch.zeros(6, 5, dtype=F64), torch.ones(6, 5, dtype=F64)
    for seed in range(4):
        (x,) = draw((3, samples, 5), seed=seed)  # three groups of two lanes
        u = batch_norm(x, mean, variance)
        torch.testing.assert_close(u, torch.stack([m(one) for m, one in zip(modules, x, strict=True)]))
    for lane in range(6):
        torch.testing.assert_close(mean[lane], modules[lane // 2].running_mean)
        torch.testing.assert_close(variance[lane], modules[lane // 2].running_var)
    (x,) = draw((samples, 5), seed=9)
    u = scaled(x.expand(6, -1, -1), *running_scale(mean, variance))
    for lane in range(6):
        torch.testing.assert_close(u[lane], modules[lane // 2].eval()(x))


def test_a_batch_of_one_is_normalised_to_zero():
    mean, variance = torch.zeros(2, 5), torch.ones(2, 5)
    (x,) = draw((1, 1, 5), dtype=torch.float32)
    assert not batch_norm(x, mean, variance).any()
    torch.testing.assert_close(mean, 0.1 * x[0].expand(2, 5))
    torch.testing.assert_close(variance, torch.full((2, 5), 0.9))


def test_running_statistics_take_no_part_in_the_gradient():
    x = torch.randn(2, 4, 3, requires_grad=True)
    mean, variance = torch.zeros(2, 3), torch.ones(2, 3)
    (batch_norm(x, mean, variance) ** 3).sum().backward()
    assert not mean.requires_grad
    assert not variance.requires_grad


@pytest.mark.parametrize("call", [normalise, lambda name, x: affine(name, x, x)])
def test_an_unknown_name_is_refused_with_the_known_ones(call):
    with pytest.raises(ValueError, match="'softmax'; known: none, batch_norm"):
        call("softmax", F.one_hot(torch.arange(3)).double())
