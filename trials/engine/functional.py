"""Normalised affine maps for dense inputs, as plain differentiable functions.

With x of n features, η the step size and g = dL/dz, one step of plain gradient descent on one sample
moves the output z by Δz (arXiv 2512.22247):

    name            z                                    Δz
    none            W x + b                              −η g (‖x‖² + 1)
    batch_norm      W (x − mean_B)/sqrt(var_B + eps) + b
    layer_norm      W (x − mean_n)/sqrt(var_n + eps) + b
    rms_norm        W x/sqrt(mean_n(x²) + eps) + b
    norm_like       W x/‖x‖ + b                          −2 η g
    norm_like_half  as norm_like, trained at η/2         −η g
    affine_like     (W x + b)/sqrt(‖x‖² + 1)             −η g
    gradient_only   W x + b, a sample's share of dW      −η g
                    and db divided by ‖x‖² + 1

Samples are the axis before the last, features the last; axes before these are lanes, the same for
inputs, weights and biases. A gain γ and a shift β act on what the normaliser returns, W (γ·u + β) + b;
for affine_like the gain is a factor of each output.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trials.engine.fused_normalisers import EPSILON, MOMENTUM
from trials.normalisers import DENSE


def normalise(name: str, x: Tensor, *, eps: float = EPSILON) -> Tensor:
    """What the weights of the map called `name` multiply, before any gain: the same shape as x, [..., B, n].

    For affine_like that is x/sqrt(‖x‖² + 1); its bias is divided likewise, which `affine` sees to. For
    batch_norm the statistics are the batch's. A zero vector has no direction: norm_like gives zero, with
    a zero gradient.

    Args:
        name: one of `trials.normalisers.DENSE`.
        x: inputs, [..., B, n].
        eps: added to the variance or mean square of batch_norm, layer_norm and rms_norm; the others need none.

    Raises:
        ValueError: for an unknown name.
    """
    if name in ("none", "gradient_only"):
        return x
    if name == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    if name == "rms_norm":
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    if name in ("norm_like", "norm_like_half"):
        wide = _wide(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        # An infinite divisor, and not a mask afterwards, makes the gradient of a zero vector zero too.
        return (wide / norm.masked_fill(norm == 0, torch.inf)).to(x.dtype)
    if name == "affine_like":
        return (_wide(x) * _inverse_length(x)).to(x.dtype)
    if name == "batch_norm":
        return batch_norm(x, eps=eps)
    raise ValueError(f"unknown normaliser {name!r}; known: {', '.join(DENSE)}")


def affine(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    eps: float = EPSILON,
) -> Tensor:
    """The affine map called `name`, [..., B, out], normalised before the product.

    Args:
        name: one of `trials.normalisers.DENSE`.
        x: inputs, [..., B, n].
        weight: [..., out, n].
        bias: [..., out], or None for zero.
        gain: [..., n]; for affine_like [..., out]; gradient_only takes no notice of it.
        shift: [..., n]; affine_like and gradient_only take no notice of it.
        eps: see `normalise`.

    Raises:
        ValueError: for an unknown name.
    """
    if name == "gradient_only":
        return _Product.apply(*_as_autocast(x, weight, bias), True)
    if name == "affine_like":
        z = _product(normalise(name, x), weight, None)
        if bias is not None:
            z = z + (bias.unsqueeze(-2) * _inverse_length(x)).to(z.dtype)
        return scaled(z, gain, None)
    return _product(scaled(normalise(name, x, eps=eps), gain, shift), weight, bias)


def scaled(u: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """γ·u + β, [..., B, n], with gain γ and shift β of shape [..., n]; None stands for 1 and 0."""
    if gain is None:
        return u if shift is None else u + shift.unsqueeze(-2)
    if shift is None:
        return u * gain.unsqueeze(-2)
    return torch.addcmul(shift.unsqueeze(-2), u, gain.unsqueeze(-2))


def folded(weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """(W γ, b + W β): weights and biases that do to u what W, b do to γ·u + β.

    Where lanes share u and each has a gain γ of its own, this saves a copy of u per lane.

    Args:
        weight: [N, out, n].
        bias: [N, out].
        gain: [N, n].
        shift: [N, n], or None for zero.
    """
    return _Folded.apply(weight, bias, gain, shift)


def batch_norm(
    x: Tensor, running_mean: Tensor | None = None, running_variance: Tensor | None = None, *, eps: float = EPSILON
) -> Tensor:
    """x with zero mean and unit (biased) variance over the batch, per feature and lane; updates running statistics.

    A batch of one has no variance; it is normalised to zero. The running variance collects the unbiased
    one, as `torch.nn.BatchNorm1d` does, with momentum 0.1.

    Args:
        x: [R, B, n] (or [..., B, n] without running statistics).
        running_mean: [N, n], N a multiple of R: rows of x are shared by N/R lanes in a row. Changed in place.
        running_variance: likewise.
    """
    mean = x.mean(-2, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(-2, keepdim=True)
    if running_mean is not None and running_variance is not None:
        samples = x.shape[-2]
        with torch.no_grad():
            unbiased = variance * (samples / max(samples - 1, 1))
            for running, batch in ((running_mean, mean), (running_variance, unbiased)):
                running.unflatten(0, (len(x), -1)).lerp_(batch.detach(), MOMENTUM)
    return centred * (variance + eps).rsqrt()


def running_scale(mean: Tensor, variance: Tensor, *, eps: float = EPSILON) -> tuple[Tensor, Tensor]:
    """The (gain, shift) that batch norm is in evaluation: (x − mean)/sqrt(variance + eps) = gain·x + shift."""
    gain = (variance + eps).rsqrt()
    return gain, -mean * gain


def _product(u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(u, weight, bias) if weight.dim() == 2 else _Product.apply(u, weight, bias, False)


def _wide(x: Tensor) -> Tensor:
    """x in at least float32: the square of a half-precision number soon overflows."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _squared_length(x: Tensor) -> Tensor:
    """‖x‖² + 1, [..., B, 1]: the affine divergence, the squared length of x with its constant 1."""
    return _wide(x).square().sum(-1, keepdim=True) + 1


def _inverse_length(x: Tensor) -> Tensor:
    return _squared_length(x).rsqrt()


def _as_autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's type, where that is on: PyTorch casts for its own operations only."""
    device = next(t.device.type for t in tensors if t is not None)
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [None if t is None else t.to(dtype) for t in tensors]


class _Product(torch.autograd.Function):
    """W x + b; where `weighed`, W and b get each sample's gradient divided by ‖x‖² + 1, and dL/dx is as it is.

    By hand also where nothing is weighed: autograd returns dW as the transpose of what it computed, and an
    optimiser's pass over W and such a dW takes several times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weighed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weighed, ctx.has_bias = weighed, bias is not None
        if bias is None:
            return x @ weight.mT
        if weight.dim() == 3:
            return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)
        return x @ weight.mT + bias.unsqueeze(-2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = grad_outputs
        into_x = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.weighed:
            gradient = (gradient / _squared_length(x)).to(gradient.dtype)
        into_weight = gradient.mT @ x if ctx.needs_input_grad[1] else None
        into_bias = gradient.sum(-2) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return into_x, into_weight, into_bias, None


class _Folded(torch.autograd.Function):
    """See `folded`. By hand, as autograd's own passes over tensors of the weights' size are twice as many."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, gain, shift)
        moved = bias.clone() if shift is None else bias + (weight @ shift.unsqueeze(-1)).squeeze(-1)
        return weight * gain.unsqueeze(-2), moved

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        weight, gain, shift = ctx.saved_tensors
        into_folded, into_bias = grad_outputs
        into_gain = (into_folded * weight).sum(-2)
        into_weight = into_folded * gain.unsqueeze(-2)
        if shift is None:
            return into_weight, into_bias, into_gain, None
        into_weight = into_weight.addcmul(into_bias.unsqueeze(-1), shift.unsqueeze(-2))
        return into_weight, into_bias, into_gain, (weight.mT @ into_bias.unsqueeze(-1)).squeeze(-1)
