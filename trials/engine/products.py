"""The products of a first affine map with many inputs: nearly all of the arithmetic of a small network.

PyTorch's matrix products on a CPU are MKL's, which takes a slower path on processors that are not
Intel's: on the AMD cores this was developed on about 100 GFLOP/s, where oneDNN, which is in the same
PyTorch, reaches 200 to 230. PyTorch offers oneDNN's product for float32 only as an operator of its
compiler's, so its absence must not hurt: then the products are `torch.bmm`'s.

Which of the two is used depends on the number of inputs and the machine, never on how many lanes there
are; and a lane's rows come out the same to the last bit whatever rows are beside them.
"""

import torch
from torch import Tensor

ONEDNN_FEATURES = 512
"""Fewest inputs at which oneDNN's cost per call is repaid."""

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def uses_onednn(weight: Tensor) -> bool:
    """Whether products with `weight` [..., features] go through oneDNN."""
    return (
        _linear is not None
        and torch.backends.mkldnn.is_available()
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[-1] >= ONEDNN_FEATURES
    )


def product(weight: Tensor, inputs: Tensor, out: Tensor | None = None) -> Tensor:
    """W Xᵀ of each group, [G, rows, samples].

    Args:
        weight: [G, rows, features].
        inputs: [G, samples, features], or [samples, features] for all groups.
        out: where to write it.
    """
    if not uses_onednn(weight):
        if inputs.dim() == 2:
            return weight @ inputs.mT
        return torch.bmm(weight, inputs.mT, out=out)
    out = weight.new_empty(*weight.shape[:2], inputs.shape[-2]) if out is None else out
    for group, into in enumerate(out):
        into.copy_(_onednn(weight[group], inputs if inputs.dim() == 2 else inputs[group]))
    return out


def subtract_product(weight: Tensor, steps: Tensor, inputs: Tensor) -> None:
    """W ← W − S X of each group, in place.

    Args:
        weight: [G, rows, features].
        steps: [G, rows, samples].
        inputs: [G, samples, features].
    """
    if not uses_onednn(weight):
        weight.baddbmm_(steps, inputs, alpha=-1)
        return
    for group, own in enumerate(weight):
        own.sub_(_onednn(steps[group], inputs[group].mT))


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ."""
    assert _linear is not None
    return _linear(a, b, None, "none", [], "")
