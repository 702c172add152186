"""The normalisers, each as a map from an affine map's input to the vector its augmented weights multiply.

Every arm can be written as one product, `z = [W b] · u(x)`, where u has one component more than x:

    none         u = (x, 1)
    batch_norm   u = ((x − mean_B) / sqrt(var_B + eps), 1)    statistics over the batch, per feature
    layer_norm   u = ((x − mean_n) / sqrt(var_n + eps), 1)    statistics over the features, per sample
    rms_norm     u = (x / sqrt(mean_n(x²) + eps), 1)
    norm_like    u = (x / ‖x‖, 1)                             x = 0 gives (0, 1), with a zero gradient
    affine_like  u = (x, 1) / sqrt(‖x‖² + 1)                  that is, (W x + b) / sqrt(‖x‖² + 1)
    norm_like_half   as norm_like; its step size is halved elsewhere (`trials.engine.optim`)
    gradient_only    as none, and a sample's share of d[W b] is divided by ‖x‖² + 1

So affine_like is norm_like of the input augmented by its constant 1, and no arm needs a bias of
its own (arXiv 2512.22247, restated). After one step of plain gradient descent on one sample the
pre-activation moves by −η g ‖u‖²: −ηg for affine_like, −2ηg for norm_like, −ηg(‖x‖² + 1) for none.

Samples stand in columns: x is [..., n, B] (features, then samples), u is [..., n + 1, B], and any
leading axes are lanes. The buffer for u comes from the caller with ones in its last row; only
affine_like writes that row. The gradients are written out by hand, because a step of a small
network costs less than autograd's record of it; the tests hold them against autograd.
"""

import torch
from torch import Tensor

EPSILON = 1e-5
MOMENTUM = 0.1


class Normaliser:
    """The arm `none`, and the interface of the others. One instance belongs to one affine map."""

    separate_in_evaluation = False
    """Whether u differs between seeds in evaluation even where x does not (running statistics)."""

    weighs_samples = False
    """Whether a sample's share of the weights' gradient is to be multiplied by what `train` returned, [..., 1, B]."""

    def train(self, x: Tensor, out: Tensor) -> Tensor | None:
        """Write u(x) into `out`; returns what `backward` needs beside u.

        Args:
            x: inputs, [..., n, B].
            out: [..., n + 1, B], ones in its last row.
        """
        _body(out).copy_(x)
        return None

    def evaluate(self, x: Tensor, out: Tensor) -> None:
        """Write u(x) into `out`, as an evaluation does: batch_norm takes its running statistics."""
        self.train(x, out)

    def backward(self, gradient: Tensor, u: Tensor, scale: Tensor | None) -> Tensor:
        """dL/dx, [..., n, B], from dL/du, [..., n + 1, B]; `scale` is what `train` returned."""
        return _body(gradient)


class LayerNorm(Normaliser):
    """Zero mean and unit (biased) variance over the features of each sample."""

    axis = -2

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        return self._standardise(x, out)[2]

    def backward(self, gradient: Tensor, u: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        gradient, u = _body(gradient), _body(u)
        along = (gradient * u).mean(self.axis, keepdim=True)
        centred = gradient - gradient.mean(self.axis, keepdim=True)
        return centred.addcmul_(u, along, value=-1).mul_(scale)

    def _standardise(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the standardised x; returns its mean, biased variance and 1/sqrt(variance + eps)."""
        mean = x.mean(self.axis, keepdim=True)
        body = torch.sub(x, mean, out=_body(out))
        variance = body.square().mean(self.axis, keepdim=True)
        scale = (variance + EPSILON).rsqrt_()
        body.mul_(scale)
        return mean, variance, scale


class BatchNorm(LayerNorm):
    """Zero mean and unit variance over the batch, per feature; no gain, no shift.

    Training normalises by the batch's biased variance. The running variance collects the
    unbiased one, B/(B−1) times as large, as PyTorch's batch norm does: it estimates the
    population's variance whatever B is, where the biased one would shrink evaluation's
    variance by the very factor (B−1)/B a study of batch size varies. A batch of one has no
    variance; its biased value, 0, is taken, and u is (0, 1).

    Args:
        like: a tensor that gives device and dtype.
        leading: lane axes of the statistics.
        features: n.
    """

    separate_in_evaluation = True
    axis = -1

    def __init__(self, like: Tensor, leading: tuple[int, ...], features: int):
        self.running_mean = like.new_zeros(*leading, features, 1)
        self.running_variance = like.new_ones(*leading, features, 1)

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        """x may have one axis more than the statistics, before the features: batches in sequence."""
        mean, variance, scale = self._standardise(x, out)
        batch = x.shape[-1]
        variance *= batch / max(batch - 1, 1)
        if mean.dim() == self.running_mean.dim():
            mean, variance = mean.unsqueeze(-3), variance.unsqueeze(-3)
        for one_mean, one_variance in zip(mean.unbind(-3), variance.unbind(-3), strict=True):
            self.running_mean.lerp_(one_mean, MOMENTUM)
            self.running_variance.lerp_(one_variance, MOMENTUM)
        return scale

    def evaluate(self, x: Tensor, out: Tensor) -> None:
        torch.sub(x, self.running_mean, out=_body(out)).mul_((self.running_variance + EPSILON).rsqrt_())


class RMSNorm(Normaliser):
    """Unit mean square over the features of each sample."""

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        scale = x.square().mean(-2, keepdim=True).add_(EPSILON).rsqrt_()
        torch.mul(x, scale, out=_body(out))
        return scale

    def backward(self, gradient: Tensor, u: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        gradient, u = _body(gradient), _body(u)
        return torch.addcmul(gradient, u, (gradient * u).mean(-2, keepdim=True), value=-1).mul_(scale)


class NormLike(Normaliser):
    """Unit length of each sample."""

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        squared = x.square().sum(-2, keepdim=True)
        scale = squared.rsqrt().masked_fill_(squared == 0, 0.0)
        torch.mul(x, scale, out=_body(out))
        return scale

    def backward(self, gradient: Tensor, u: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        gradient, u = _body(gradient), _body(u)
        return torch.addcmul(gradient, u, (gradient * u).sum(-2, keepdim=True), value=-1).mul_(scale)


class AffineLike(Normaliser):
    """The affine output divided by sqrt(‖x‖² + 1)."""

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        scale = out.narrow(-2, x.shape[-2], 1)
        torch.add(x.square().sum(-2, keepdim=True), 1.0, out=scale).rsqrt_()
        torch.mul(x, scale, out=_body(out))
        return scale

    def backward(self, gradient: Tensor, u: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        along = (gradient * u).sum(-2, keepdim=True)  # the constant's component included: u has unit length
        return torch.addcmul(_body(gradient), _body(u), along, value=-1).mul_(scale)


class GradientOnly(Normaliser):
    """The affine map as it is; only its weights' gradient is corrected for the length of each input."""

    weighs_samples = True

    def train(self, x: Tensor, out: Tensor) -> Tensor:
        _body(out).copy_(x)
        return x.square().sum(-2, keepdim=True).add_(1.0).reciprocal_()


def make_normaliser(name: str, like: Tensor, leading: tuple[int, ...], features: int) -> Normaliser:
    """The normaliser called `name`, for one affine map with `features` inputs and lanes `leading`.

    Raises:
        ValueError: for an unknown name.
    """
    if name == "batch_norm":
        return BatchNorm(like, leading, features)
    if name not in _STATELESS:
        raise ValueError(f"unknown normaliser {name!r}; known: batch_norm, {', '.join(_STATELESS)}")
    return _STATELESS[name]()


_STATELESS: dict[str, type[Normaliser]] = {
    "none": Normaliser,
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "norm_like": NormLike,
    "affine_like": AffineLike,
    "norm_like_half": NormLike,
    "gradient_only": GradientOnly,
}


def _body(u: Tensor) -> Tensor:
    """u without its last row."""
    return u.narrow(-2, 0, u.shape[-2] - 1)
