"""Each normaliser against plain PyTorch, its hand-written gradient against autograd and finite differences."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trials.engine.fused_normalisers import BatchNorm, Normaliser, make_normaliser

NAMES = ("none", "batch_norm", "layer_norm", "rms_norm", "norm_like", "affine_like")
F64 = torch.float64


def build(name: str, lanes: tuple[int, ...] = (), n: int = 7) -> Normaliser:
    return make_normaliser(name, torch.zeros(1, dtype=F64), lanes, n)


def room(x: Tensor) -> Tensor:
    return x.new_ones(*x.shape[:-2], x.shape[-2] + 1, x.shape[-1])


def forward(normaliser: Normaliser, x: Tensor) -> tuple[Tensor, Tensor | None]:
    u = room(x)
    return u, normaliser.train(x, u)


def affine_output(name: str, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """The layer as SCIENCE writes it, on rows x [B, n]: written apart from the code under test."""
    n = x.shape[1]
    if name == "batch_norm":
        return F.linear(F.batch_norm(x, None, None, training=True, eps=1e-5), weight, bias)
    if name == "layer_norm":
        return F.linear(F.layer_norm(x, (n,), eps=1e-5), weight, bias)
    if name == "rms_norm":
        return F.linear(x / torch.sqrt((x**2).mean(1, keepdim=True) + 1e-5), weight, bias)
    if name == "norm_like":
        return F.linear(x / torch.linalg.norm(x, dim=1, keepdim=True), weight, bias)
    if name == "affine_like":
        return F.linear(x, weight, bias) / torch.sqrt((x**2).sum(1, keepdim=True) + 1)
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lanes", [(), (3,), (2, 3)])
def test_output_and_gradients_equal_plain_pytorch(name: str, lanes: tuple[int, ...]):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*lanes, 7, 5, dtype=F64, generator=generator) * 2 + 0.5
    weight = torch.randn(*lanes, 4, 7, dtype=F64, generator=generator)
    bias = torch.randn(*lanes, 4, dtype=F64, generator=generator)
    into_z = torch.randn(*lanes, 4, 5, dtype=F64, generator=generator)
    normaliser = build(name, lanes)
    u, scale = forward(normaliser, x)
    augmented = torch.cat([weight, bias[..., None]], -1)
    z = augmented @ u
    into_x = normaliser.backward(augmented.mT @ into_z, u, scale)
    into_weight = into_z @ u.mT
    flat = (v.reshape(-1, *v.shape[len(lanes) :]) for v in (x, weight, bias, into_z, z, into_x, into_weight))
    for one_x, one_w, one_b, one_into_z, one_z, one_into_x, one_into_w in zip(*flat, strict=True):
        leaves = [one_x.mT.clone().requires_grad_(), one_w.clone().requires_grad_(), one_b.clone().requires_grad_()]
        expected = affine_output(name, leaves[1], leaves[2], leaves[0])
        gradients = torch.autograd.grad(expected, leaves, one_into_z.mT)
        torch.testing.assert_close(one_z.mT, expected)
        torch.testing.assert_close(one_into_x.mT, gradients[0])
        torch.testing.assert_close(one_into_w[:, :-1], gradients[1])
        torch.testing.assert_close(one_into_w[:, -1], gradients[2])


@pytest.mark.parametrize("name", NAMES)
def test_hand_written_gradient_passes_gradcheck(name: str):
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            normaliser = build(name)
            u, scale = forward(normaliser, x)
            ctx.held = normaliser, u, scale
            return u.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            normaliser, u, scale = ctx.held
            return normaliser.backward(grad_outputs[0].contiguous(), u, scale).clone()

    x = torch.randn(7, 5, dtype=F64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(Through.apply, (x,))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**31), size=st.floats(1e-3, 1e3), batch=st.integers(1, 6), n=st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_zero_and_random_inputs_give_finite_values_and_gradients(name: str, seed: int, size: float, batch: int, n: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, batch, generator=generator) * size
    x[:, 0] = 0
    normaliser = make_normaliser(name, x, (), n)
    u, scale = forward(normaliser, x)
    gradient = normaliser.backward(torch.randn(u.shape, generator=generator), u, scale)
    assert u.isfinite().all()
    assert gradient.isfinite().all()
    if name == "norm_like":
        assert u[:, 0].tolist() == [0.0] * n + [1.0]
        assert not gradient[:, 0].any()


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("affine_like", lambda x: 1.0),
        ("norm_like", lambda x: 2.0),
        ("none", lambda x: 1.0 + float((x**2).sum())),
    ],
)
@given(seed=st.integers(0, 2**31), size=st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_activation_moves_by_the_papers_multiple_of_the_gradient(name: str, factor, seed: int, size: float):
    """One sample, one step of gradient descent on [W b]: Δz = −(multiple) η g, exactly, as z is affine in W."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 1, dtype=F64, generator=generator) * size
    target = torch.randn(4, 1, dtype=F64, generator=generator)
    weight = torch.randn(4, 8, dtype=F64, generator=generator, requires_grad=True)
    rate = 0.01
    u, _ = forward(build(name), x)
    z = weight @ u
    loss = F.smooth_l1_loss(z, target, reduction="sum")
    into_z, into_weight = torch.autograd.grad(loss, [z, weight])
    moved = (weight - rate * into_weight) @ u - z
    torch.testing.assert_close(moved, -rate * factor(x) * into_z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(scale=st.floats(2, 50), seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_scale_invariance_where_the_normaliser_has_it_and_only_there(name: str, scale: float, seed: int):
    x = torch.randn(7, 5, dtype=F64, generator=torch.Generator().manual_seed(seed)) + 0.1
    u, _ = forward(build(name), x)
    scaled, _ = forward(build(name), x * scale)
    invariant = torch.allclose(u, scaled, rtol=1e-3, atol=1e-3)  # eps spoils it slightly
    assert invariant == (name in {"batch_norm", "layer_norm", "rms_norm", "norm_like"})
    if name == "norm_like":
        torch.testing.assert_close(u, scaled)  # it has no eps


def test_batch_norm_follows_pytorch_through_training_into_evaluation():
    generator = torch.Generator().manual_seed(3)
    normaliser, plain = build("batch_norm"), torch.nn.BatchNorm1d(7, affine=False, dtype=F64)
    batches = torch.randn(4, 7, 5, dtype=F64, generator=generator) * 3 + 1
    for batch in batches:
        u, _ = forward(normaliser, batch)
        torch.testing.assert_close(u[:-1].mT, plain(batch.mT))
    held_out = torch.randn(7, 9, dtype=F64, generator=generator)
    u = room(held_out)
    normaliser.evaluate(held_out, u)
    torch.testing.assert_close(u[:-1].mT, plain.eval()(held_out.mT))
    assert u[-1].eq(1).all()


def test_batch_norm_takes_batches_in_sequence_as_one_stack():
    x = torch.randn(2, 3, 7, 5, dtype=F64, generator=torch.Generator().manual_seed(4))  # lanes, batches, n, B
    stacked, one_by_one = build("batch_norm", (2,)), build("batch_norm", (2,))
    assert isinstance(stacked, BatchNorm)
    assert isinstance(one_by_one, BatchNorm)
    u, _ = forward(stacked, x)
    for index in range(3):
        torch.testing.assert_close(u[:, index], forward(one_by_one, x[:, index])[0])
    torch.testing.assert_close(stacked.running_mean, one_by_one.running_mean)
    torch.testing.assert_close(stacked.running_variance, one_by_one.running_variance)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="norm_lik"):
        build("norm_lik")
