"""Normalised convolutions and normalisers of images, as plain differentiable functions, and the patch norms as modules.

In a convolution a patch, all that a kernel covers at one position, plays the part of a dense map's x. With
η the step size and g = dL/dz at an only position, one step of plain gradient descent on one sample moves the
output there by Δz (arXiv 2512.22247):

    name               z at a position                          Δz
    none               W·patch + b                              −η g (‖patch‖² + 1)
    patch_norm         W·patch/‖patch‖ + b                      −2 η g
    patch_norm_affine  (W·patch + b)/sqrt(‖patch‖² + 1)         −η g

A patch norm is no normaliser followed by a convolution: one value of the image is in several patches, and is
divided by a different norm in each. The classical normalisers (`normalise`, `batch_norm`) are: they act on the
image, before it is padded with zeros. Images are [..., channels, height, width].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.engine.fused_normalisers import EPSILON, MOMENTUM

MOST_GROUPS = 4

_Pair = int | tuple[int, ...]


def patch_squared_norms(
    x: Tensor,
    kernel: _Pair,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    groups: int = 1,
) -> Tensor:
    """‖patch‖² of every patch of x: x², summed over a group's channels, convolved with a kernel of ones.

    In at least float32, as the square of a half-precision number soon overflows.

    Args:
        x: images, [B, channels, height, width] or [channels, height, width].
        kernel: side, or (height, width).
        stride, padding, dilation, groups: as `torch.nn.functional.conv2d` takes them.

    Returns:
        [B, groups, height out, width out], or without B.
    """
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    device = x.device.type
    # Autocast would convolve in half precision what has been widened.
    with torch.autocast(device if device != "meta" else "cpu", enabled=False):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        squares = wide.square().unflatten(-3, (groups, -1)).sum(-3)
        ones = squares.new_ones(groups, 1, *sides)
        return F.conv2d(squares, ones, None, stride, padding, dilation, groups)


def patch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    groups: int = 1,
) -> Tensor:
    """γ · W·patch/‖patch‖ + b at every position; an all-zero patch gives b, and gets a zero gradient.

    So does a patch whose ‖patch‖² is below the smallest normal number: in float32 one shorter than 1e-19.

    Args:
        x: images, [B, channels, height, width] or [channels, height, width].
        weight: [out, channels/groups, kernel height, kernel width].
        bias: b, [out], or None for zero.
        gain: γ, [out], or None for one.
        stride, padding, dilation, groups: as `torch.nn.functional.conv2d` takes them.

    Returns:
        [B, out, height out, width out], or without B.
    """
    squares = patch_squared_norms(x, weight.shape[2:], stride, padding, dilation, groups)
    # An infinite square, and not a mask afterwards, makes the gradient of a zero patch zero too. No rsqrt, whose
    # gradient cubes the factor: that overflows long before the gradient itself does.
    smallest = torch.finfo(squares.dtype).tiny
    inverse = squares.masked_fill(squares < smallest, torch.inf).sqrt().reciprocal()
    z = F.conv2d(x, _by_row(weight, gain), None, stride, padding, dilation, groups)
    z = _times(z, inverse)
    return z if bias is None else z + bias.to(z.dtype)[:, None, None]


def patch_norm_affine(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    groups: int = 1,
) -> Tensor:
    """γ (W·patch + b)/sqrt(‖patch‖² + 1) at every position. Arguments and result as for `patch_norm`."""
    squares = patch_squared_norms(x, weight.shape[2:], stride, padding, dilation, groups)
    if gain is not None and bias is not None:
        bias = bias * gain
    z = F.conv2d(x, _by_row(weight, gain), bias, stride, padding, dilation, groups)
    return _times(z, (squares + 1).rsqrt())


def normalise(name: str, x: Tensor, *, eps: float = EPSILON) -> Tensor:
    """x, [..., channels, height, width], normalised sample by sample; the same shape.

    layer_norm has zero mean and unit (biased) variance over all values of a sample, rms_norm unit mean square;
    group_norm as layer_norm over each of `groups_of(channels)` equal stretches of channels, instance_norm over
    each channel alone. `batch_norm` has a function of its own; the patch norms are no normalisers of x.

    Raises:
        ValueError: for a name of none of these.
    """
    if name == "none":
        return x
    if name == "layer_norm":
        return F.layer_norm(x, x.shape[-3:], eps=eps)
    if name == "rms_norm":
        return F.rms_norm(x, x.shape[-3:], eps=eps)
    if name == "group_norm":
        parts = x.unflatten(-3, (groups_of(x.shape[-3]), -1))
        return F.layer_norm(parts, parts.shape[-3:], eps=eps).flatten(-4, -3)
    if name == "instance_norm":
        return F.layer_norm(x, x.shape[-2:], eps=eps)
    known = "none, layer_norm, rms_norm, group_norm, instance_norm"
    raise ValueError(f"{name!r} does not normalise images one by one; use {known}")


def groups_of(channels: int) -> int:
    """Groups of group_norm: the most, up to 4, that are equal and have two channels or more; else one group.

    Ours: the paper has no group norm. Four, as images here have few channels; the usual 32 would leave one
    channel to a group, and groups of one channel are instance norm.
    """
    return max(n for n in range(1, MOST_GROUPS + 1) if n == 1 or (channels % n == 0 and channels // n >= 2))


def batch_norm(
    x: Tensor, running_mean: Tensor | None = None, running_variance: Tensor | None = None, *, eps: float = EPSILON
) -> Tensor:
    """x with zero mean and unit (biased) variance per channel, over batch and positions; updates running statistics.

    The running variance collects the unbiased one, as `torch.nn.BatchNorm2d` does, with momentum 0.1. A
    channel of a single value has no variance; it is normalised to zero, up to rounding.

    Args:
        x: [B, R, channels, height, width].
        running_mean: [N, channels], N a multiple of R: each of the R is shared by N/R lanes in a row. Changed in
            place.
        running_variance: likewise.
    """
    if running_mean is not None and running_variance is not None:
        count = x.shape[0] * x.shape[3] * x.shape[4]
        with torch.no_grad():
            variance, mean = torch.var_mean(x, (0, 3, 4), correction=0)
            for running, batch in ((running_mean, mean), (running_variance, variance * (count / max(count - 1, 1)))):
                running.unflatten(0, (x.shape[1], -1)).lerp_(batch.unsqueeze(1), MOMENTUM)
    # Not nn.functional's, which refuses a single value per channel.
    z = torch.batch_norm(x.flatten(1, 2), None, None, None, None, True, MOMENTUM, eps, torch.backends.cudnn.enabled)
    return z.view(x.shape)


def _by_row(weight: Tensor, gain: Tensor | None) -> Tensor:
    return weight if gain is None else weight * gain[:, None, None, None]


def _times(z: Tensor, factors: Tensor) -> Tensor:
    """z [..., out, H, W] times the factor of its group and position, factors [..., groups, H, W]."""
    parts = z.unflatten(-3, (factors.shape[-3], -1))
    return (parts * factors.unsqueeze(-3)).to(z.dtype).flatten(-4, -3)


class _PatchNorm(nn.Conv2d):
    """`nn.Conv2d` with a patch norm and, where asked for, a gain."""

    gain: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gain: bool = False,
    ):
        if padding_mode != "zeros":
            raise ValueError(
                f"{type(self).__name__} pads with zeros only, not padding_mode {padding_mode!r}; "
                "pad the input with torch.nn.functional.pad and use padding=0"
            )
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, "zeros", device, dtype
        )
        self.register_parameter("gain", nn.Parameter(self.weight.new_ones(out_channels)) if gain else None)

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Conv2d` does; set the gain to 1."""
        super().reset_parameters()
        gain = getattr(self, "gain", None)  # nn.Conv2d's constructor calls this before there is one
        if gain is not None:
            nn.init.ones_(gain)

    def _options(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gain is None else ", gain=True")


class PatchNormConv2d(_PatchNorm):
    """z = W·patch/‖patch‖ + b at every position: each patch at unit length. Takes the place of `torch.nn.Conv2d`.

    A step of gradient descent on one sample with one position moves z by −2η g, whatever the length of the
    patch. The output does not feel the scale of the input: z(c·x) = z(x) for c > 0. An all-zero patch gives
    z = b and gets a zero gradient. This is no normaliser followed by a convolution, as overlapping patches
    have norms of their own. With groups a patch is that of a group's channels.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, device, dtype: as for
            `nn.Conv2d`.
        padding_mode: `zeros`; others are refused.
        gain: whether W·patch/‖patch‖ is multiplied by a learnable γ of shape (out_channels), 1 at the start,
            before b is added.

    Shapes: input (B, in_channels, H, W) or (in_channels, H, W), output likewise as of `nn.Conv2d`.

    Raises:
        ValueError: for another padding_mode than zeros.

    Reference: arXiv 2512.22247, PatchNorm.
    """

    def forward(self, input: Tensor) -> Tensor:
        return patch_norm(input, self.weight, self.bias, self.gain, **self._options())


class PatchNormAffineConv2d(_PatchNorm):
    """z = (W·patch + b)/sqrt(‖patch‖² + 1) at every position. Takes the place of `torch.nn.Conv2d`.

    A step of gradient descent on one sample with one position moves z by exactly −η g. Unlike `PatchNormConv2d`
    it is not scale-invariant, keeps the length of a patch, and has nothing to divide by zero. With groups a
    patch is that of a group's channels.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, device, dtype: as for
            `nn.Conv2d`.
        padding_mode: `zeros`; others are refused.
        gain: whether z is multiplied by a learnable γ of shape (out_channels), 1 at the start.

    Shapes: input (B, in_channels, H, W) or (in_channels, H, W), output likewise as of `nn.Conv2d`.

    Raises:
        ValueError: for another padding_mode than zeros.

    Reference: arXiv 2512.22247, the affine-like form of PatchNorm.
    """

    def forward(self, input: Tensor) -> Tensor:
        return patch_norm_affine(input, self.weight, self.bias, self.gain, **self._options())
