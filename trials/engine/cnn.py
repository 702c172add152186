"""Convolutional networks of many lanes; see `trials.engine.networks` for what lanes, maps and records are.

Between layers the lanes' images stand as [B, N, channels, height, width], so that one grouped convolution,
N groups of channels, serves all lanes. The first layer's has a group per seed instead: the lanes of a seed
share their images, and their kernels stand side by side.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trials.engine import functional
from trials.engine.convolutions import (
    batch_norm,
    normalise,
    patch_norm,
    patch_norm_affine,
)
from trials.engine.networks import DenseMap, LaneNetwork, Pass, Recorder
from trials.normalisers import CONVOLUTIONAL, FACTS, in_head
from trials.records import TrialConfig
from trials.sizes import cnn_shapes

_PATCH_NORMS = {"patch_norm": patch_norm, "patch_norm_affine": patch_norm_affine}
_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 2),
}


class CNN(LaneNetwork):
    """Convolutions `conv1`, `conv2`, …, each h ← pool(activation(conv(h))), and an affine head on what is left.

    One convolution for each of `config.channels`, its kernel padded with zeros by half its side; pooling is 2 × 2
    and drops an odd last row and column. The head has the normaliser's dense counterpart
    (`trials.normalisers`); with placement `post` it is plain.
    """

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        super().__init__(config, shape, classes)
        if config.channels is None or config.kernel is None or config.stride is None or config.pooling is None:
            raise ValueError("a cnn needs channels, kernel, stride and pooling; set them in the config")
        if config.pooling not in (*_POOLINGS, "none"):
            raise ValueError(f"unknown pooling {config.pooling!r}; known: {', '.join(_POOLINGS)}, none")
        if config.normaliser not in CONVOLUTIONAL:
            known = ", ".join(CONVOLUTIONAL)
            raise ValueError(f"normaliser {config.normaliser!r} is not for a model of kind cnn; use {known}")
        if config.placement == "post" and not FACTS[config.normaliser].post:
            raise ValueError(f"placement 'post' has no meaning for normaliser {config.normaliser!r}; use 'pre'")
        self._convolutions: list[_ConvolutionMap] = []
        left = shape
        for index, layer in enumerate(cnn_shapes(config, shape)):
            self._convolutions.append(_ConvolutionMap(f"conv{index + 1}", left[0], layer.convolved[0], config))
            left = layer.pooled
        counterpart = in_head(config.normaliser)
        # The head has no activation to be normalised for.
        normaliser = "none" if config.placement == "post" else counterpart
        self._head = DenseMap("head", math.prod(left), classes, normaliser, gain=config.gain)
        self.affine_maps = (*(one.name for one in self._convolutions), "head")

    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parameters: dict[str, Tensor] = {}
        for one in (*self._convolutions, self._head):
            parameters |= one.initial(generator)
        return parameters

    def buffers(self) -> dict[str, Tensor]:
        maps = (*self._convolutions, self._head)
        return {name: value for one in maps for name, value in one.buffers().items()}

    def forward(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        *,
        training: bool,
        record: Recorder | None = None,
    ) -> Tensor:
        run = Pass(parameters, buffers, training, record)
        h = inputs.unflatten(-1, self.shape).transpose(0, 1)
        for convolution in self._convolutions:
            h = self._pooled(self.activation(convolution(h, run)))
        return self._head(h.flatten(2).transpose(0, 1), run)

    def _pooled(self, h: Tensor) -> Tensor:
        pooling = self.config.pooling
        if pooling is None or pooling == "none":
            return h
        return _POOLINGS[pooling](h.flatten(1, 2)).unflatten(1, h.shape[1:3])


class _ConvolutionMap:
    """One convolution of every lane with its normaliser, on [B, N or G, channels, height, width].

    The classical normalisers act on the image before it is padded, their gain and shift are per channel. A
    pre gain is folded into the kernels. A pre shift is not, as the zeros of the padding are not shifted: it is
    an image of its own, one sample, convolved and added.
    """

    def __init__(self, name: str, inputs: int, outputs: int, config: TrialConfig):
        assert config.kernel is not None
        assert config.stride is not None
        self.name, self._normaliser, self._post = name, config.normaliser, config.placement == "post"
        self._inputs, self._outputs, self._kernel = inputs, outputs, config.kernel
        self._geometry = {"stride": config.stride, "padding": config.kernel // 2}
        self._normalised = outputs if self._post or FACTS[self._normaliser].gain == "outputs" else inputs
        self._gain = config.gain and FACTS[self._normaliser].gain is not None
        self._shift = self._gain and FACTS[self._normaliser].shift

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One lane's parameters: kernels, then bias, uniform on ±1/sqrt(values of a patch), as `nn.Conv2d`."""
        bound = 1 / math.sqrt(self._inputs * self._kernel**2)
        kernels = torch.empty(self._outputs, self._inputs, self._kernel, self._kernel)
        parameters = {
            f"{self.name}.weight": kernels.uniform_(-bound, bound, generator=generator),
            f"{self.name}.bias": torch.empty(self._outputs).uniform_(-bound, bound, generator=generator),
        }
        if self._gain:
            parameters[f"{self.name}.gain"] = torch.ones(self._normalised)
        if self._shift:
            parameters[f"{self.name}.shift"] = torch.zeros(self._normalised)
        return parameters

    def buffers(self) -> dict[str, Tensor]:
        if self._normaliser != "batch_norm":
            return {}
        return {
            f"{self.name}.mean": torch.zeros(self._normalised),
            f"{self.name}.variance": torch.ones(self._normalised),
        }

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        """[B, N, outputs, height, width] from x [B, N, inputs, ...], or from [B, G, inputs, ...] that lanes share."""
        weight, bias = run.parameters[f"{self.name}.weight"], run.parameters[f"{self.name}.bias"]
        if self._normaliser in _PATCH_NORMS:
            return self._patch_normalised(x, weight, bias, run)
        if self._post:
            z = self._recorded(run, x, None, None, None, self._convolved(x, weight, bias))
            return _scaled(*self._normalise(z, run))
        u, scale, offset = self._normalise(x, run)
        z = self._convolved(u, weight if scale is None else weight * scale[:, None, :, None, None], bias)
        if offset is not None:
            shifts = offset[None, :, :, None, None].expand(1, *offset.shape, *x.shape[-2:])
            z = z + self._convolved(shifts, weight, None)
        return self._recorded(run, x, u, scale, offset, z)

    def _patch_normalised(self, x: Tensor, weight: Tensor, bias: Tensor, run: Pass) -> Tensor:
        gain = run.parameters[f"{self.name}.gain"].flatten() if self._gain else None
        function = _PATCH_NORMS[self._normaliser]
        kernels = weight.flatten(0, 1)
        z = function(x.flatten(1, 2), kernels, bias.flatten(), gain, **self._geometry, groups=x.shape[1])
        return self._recorded(run, x, None, None, None, z.unflatten(1, weight.shape[:2]))

    def _convolved(self, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[B, N, outputs, ...] of u [B, N or G, inputs, ...]."""
        flat = None if bias is None else bias.flatten()
        z = F.conv2d(u.flatten(1, 2), weight.flatten(0, 1), flat, **self._geometry, groups=u.shape[1])
        return z.unflatten(1, weight.shape[:2])

    def _normalise(self, x: Tensor, run: Pass) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x normalised, and the scale and shift [N, channels] that are still to act."""
        gain = run.parameters[f"{self.name}.gain"] if self._gain else None
        shift = run.parameters[f"{self.name}.shift"] if self._shift else None
        if self._normaliser != "batch_norm":
            return normalise(self._normaliser, x), gain, shift
        mean, variance = run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.variance"]
        if run.training:
            return batch_norm(x, mean, variance), gain, shift
        scale, offset = functional.running_scale(mean, variance)
        if gain is not None and shift is not None:
            scale, offset = scale * gain, offset * gain + shift
        return x, scale, offset

    def _recorded(
        self, run: Pass, x: Tensor, u: Tensor | None, scale: Tensor | None, offset: Tensor | None, z: Tensor
    ) -> Tensor:
        """z, after a record of patches as rows; without u it is made of the patches of x."""
        if run.record is None:
            return z
        patches = self._patches(x)
        if u is None:
            dense = in_head(self._normaliser) if self._normaliser in _PATCH_NORMS else "none"
            multiplied = functional.normalise(dense, patches)
        else:
            if scale is not None:
                u = _scaled(u.repeat_interleave(len(scale) // u.shape[1], 1), scale, offset)
            multiplied = self._patches(u)
        batch, _, _, height, width = z.shape
        # The graph goes on from these rows, so that dL/dz is theirs.
        rows = z.permute(1, 0, 3, 4, 2).flatten(1, 3)
        if not rows.requires_grad:
            rows.requires_grad_()
        run.record(self.name, patches, multiplied, rows)
        return rows.unflatten(1, (batch, height, width)).permute(1, 0, 4, 2, 3)

    def _patches(self, x: Tensor) -> Tensor:
        """[N or G, B·positions, channels·kernel²] of images [B, N or G, channels, height, width]."""
        columns = F.unfold(x.flatten(0, 1), self._kernel, **self._geometry)
        return columns.unflatten(0, x.shape[:2]).permute(1, 0, 3, 2).flatten(1, 2)


def _scaled(z: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """scale·z + offset of images [B, N, channels, height, width] by [N, channels]; None stands for 1 and 0."""
    if scale is None:
        return z
    factors = scale[:, :, None, None]
    return z * factors if offset is None else torch.addcmul(offset[:, :, None, None], z, factors)
