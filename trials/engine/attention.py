"""A small attention model of many lanes; see `trials.engine.networks` for what lanes and maps are."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trials.engine.networks import DenseMap, DenseNetwork, Pass
from trials.records import TrialConfig


class _Block(NamedTuple):
    query: DenseMap
    key: DenseMap
    value: DenseMap
    output: DenseMap
    expand: DenseMap
    contract: DenseMap


class Attention(DenseNetwork):
    """Self-attention over patches.

    A sample (C, H, W) is cut into squares of side `patch`, which become tokens of C·patch² values, from
    the top left, row by row; a sample of height 1 (a vector) is cut along its only axis, and its tokens
    have C·patch values. The tokens are embedded in `width` features, and a learned position is added. Then `depth`
    blocks with hidden features 2·width,

        h ← h + output(attention(query(h), key(h), value(h)))
        h ← h + contract(activation(expand(h))),

    the mean over the tokens and an affine head. Every one of these affine maps has the normaliser, token
    by token (batch norm: over all tokens of the batch); with placement `post` every one but the head is
    normalised after the product. The position is drawn after the embedding, uniform on ±1/sqrt(width).
    """

    def __init__(self, config: TrialConfig, shape: tuple[int, int, int], classes: int):
        super().__init__(config, shape, classes)
        if config.heads is None or config.patch is None:
            raise ValueError("an attention model needs heads and patch; set both in the config")
        channels, height, width = shape
        self._patch = (config.patch if height > 1 else 1, config.patch)
        if height % self._patch[0] or width % self._patch[1]:
            raise ValueError(
                f"samples of {height} × {width} cannot be cut into patches of {self._patch[0]} × {self._patch[1]}; "
                f"choose a `patch` that divides {'both sides' if height > 1 else 'the number of features'}"
            )
        if config.width % config.heads:
            raise ValueError(f"width {config.width} is not a multiple of heads {config.heads}; choose one that is")
        self._heads = config.heads
        self._tokens = (height // self._patch[0]) * (width // self._patch[1])
        features = config.width
        self._embed = self._map("embed", channels * math.prod(self._patch), features)
        self._blocks = [self._block(f"block{i + 1}", features) for i in range(config.depth)]
        self._head = self._map("head", features, classes)

    def _block(self, name: str, features: int) -> _Block:
        sizes = dict.fromkeys(_Block._fields, (features, features))
        sizes |= {"expand": (features, 2 * features), "contract": (2 * features, features)}
        return _Block(**{part: self._map(f"{name}.{part}", *size) for part, size in sizes.items()})

    def initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        parameters = self._embed.initial(generator)
        bound = 1 / math.sqrt(self.config.width)
        position = torch.empty(self._tokens, self.config.width)
        parameters["position"] = position.uniform_(-bound, bound, generator=generator)
        for name, one in self._maps.items():
            if name != "embed":
                parameters |= one.initial(generator)
        return parameters

    def _forward(self, inputs: Tensor, run: Pass) -> Tensor:
        batch, position = inputs.shape[1], run.parameters["position"]
        h = self._embed(self._cut(inputs), run).unflatten(1, (batch, self._tokens))
        h = (h + position.unsqueeze(1)).flatten(1, 2)
        for block in self._blocks:
            query, key, value = (self._split(one(h, run), batch) for one in (block.query, block.key, block.value))
            # Written out: PyTorch's fused kernels are no faster at these sizes, and on a GPU limit N·B.
            scores = (query / math.sqrt(query.shape[-1])) @ key.mT
            mixed = torch.softmax(scores, -1) @ value
            h = h + block.output(mixed.transpose(1, 2).reshape(h.shape), run)
            h = h + block.contract(self.activation(block.expand(h, run)), run)
        return self._head(h.unflatten(1, (batch, self._tokens)).mean(2), run)

    def _cut(self, inputs: Tensor) -> Tensor:
        """Tokens [G, B·T, C·p·q] of samples [G, B, features]."""
        groups, batch = inputs.shape[:2]
        channels, height, width = self.shape
        p, q = self._patch
        cut = inputs.reshape(groups * batch, channels, height // p, p, width // q, q)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(groups, batch * self._tokens, channels * p * q)

    def _split(self, projected: Tensor, batch: int) -> Tensor:
        """[N·B, heads, T, width/heads] of [N, B·T, width]."""
        lanes, _, features = projected.shape
        split = projected.reshape(lanes * batch, self._tokens, self._heads, features // self._heads)
        return split.transpose(1, 2)
