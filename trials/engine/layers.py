"""The layers of "The Affine Divergence" as modules for anybody's PyTorch models.

    from trials.engine.layers import AffineLikeLinear, PatchNormConv2d

Each takes the place of `torch.nn.Linear` or `torch.nn.Conv2d`, with the same arguments, the same
initialisation and the same names in its state, so that a checkpoint of the plain layer loads. None needs
another normaliser beside it. Reference: "The Affine Divergence: Aligning Activation Updates Beyond
Normalisation", arXiv 2512.22247.

With step size η and g = dL/dz, a step of gradient descent on one sample moves the output of `nn.Linear`
by −η g (‖x‖² + 1): by more, the longer its input. These layers take that factor out, each its own way.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trials.engine.convolutions import PatchNormAffineConv2d, PatchNormConv2d
from trials.engine.functional import affine

__all__ = [
    "AffineLikeLinear",
    "GradientOnlyLinear",
    "NormLikeLinear",
    "PatchNormAffineConv2d",
    "PatchNormConv2d",
]


class _Linear(nn.Linear):
    """`nn.Linear` with a normaliser of `functional` and, where asked for, a gain."""

    _normaliser: str
    gain: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gain: bool = False,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        scales = self._scales() if gain else 0
        self.register_parameter("gain", nn.Parameter(self.weight.new_ones(scales)) if scales else None)

    def _scales(self) -> int:
        """Number of scales of a gain."""
        return self.in_features

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does; set the gain to 1."""
        super().reset_parameters()
        gain = getattr(self, "gain", None)  # nn.Linear's constructor calls this before there is one
        if gain is not None:
            nn.init.ones_(gain)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        z = affine(self._normaliser, rows, self.weight, self.bias, self.gain)
        return z.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.gain is None else ", gain=True")


class NormLikeLinear(_Linear):
    """z = W x/‖x‖ + b: the input at unit length.

    A step of gradient descent on one sample moves z by −2η g, whatever the length of x: the divergence is
    gone up to the constant 2, which half the step size (the paper's "half η") removes. Without a bias the
    constant is 1. The map does not see the length of x (it is scale-invariant): z(c·x) = z(x) for c > 0. A zero
    input gives z = b and gets a zero gradient.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether there is a b.
        device, dtype: of the parameters.
        gain: whether x/‖x‖ is multiplied by a learnable γ of shape (in_features), 1 at the start.

    Shapes: input (*, in_features), output (*, out_features).

    Reference: arXiv 2512.22247, the norm-like correction.
    """

    _normaliser = "norm_like"


class AffineLikeLinear(_Linear):
    """z = (W x + b)/sqrt(‖x‖² + 1): the affine map at unit length of (x, 1).

    A step of gradient descent on one sample moves z by exactly −η g. Unlike a normaliser it is not
    scale-invariant, needs no ε, and keeps the length of x: x/sqrt(‖x‖² + 1) fills the unit ball.

    Without a bias the factor to take out is ‖x‖² and not ‖x‖² + 1; the divisor is the same, so that a step moves z
    by −η g ‖x‖²/(‖x‖² + 1). `NormLikeLinear(bias=False)` is then the exact correction.

    In float32 (and in half precision, which is squared in float32) z holds for ‖x‖ up to about 1e19 and the
    gradient of x up to about 1e13, above which ‖x‖² + 1 and its powers leave the type's range: z becomes 0, and the
    gradient wrong or not finite. Scale longer inputs down first.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether there is a b.
        device, dtype: of the parameters.
        gain: whether z is multiplied by a learnable γ of shape (out_features), 1 at the start.

    Shapes: input (*, in_features), output (*, out_features).

    Reference: arXiv 2512.22247, the affine-like correction.
    """

    _normaliser = "affine_like"

    def _scales(self) -> int:
        return self.out_features


class GradientOnlyLinear(_Linear):
    """z = W x + b, with each sample's contribution to dL/dW and dL/db divided by ‖x‖² + 1.

    The forward pass and dL/dx are those of `nn.Linear`; a step of gradient descent on one sample moves z by
    exactly −η g. The gradients of W and b are therefore not the derivatives of the output: `gradcheck`
    finds a difference, as it must.

    Args:
        in_features: size of an input.
        out_features: size of an output.
        bias: whether there is a b. Without one the divisor stays ‖x‖² + 1, and a step moves z by
            −η g ‖x‖²/(‖x‖² + 1).
        device, dtype: of the parameters.
        gain: taken so that the layers can be exchanged; there is nothing normalised here to scale, and it changes
            nothing.

    Shapes: input (*, in_features), output (*, out_features).

    Reference: arXiv 2512.22247, the gradient-only adjustment of the learning rate.
    """

    _normaliser = "gradient_only"

    def _scales(self) -> int:
        return 0
