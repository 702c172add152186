"""What is to be known of each normaliser beside its formula: for which models, in which place, and what it learns.

The formulas are in `trials.engine` (`functional`, `convolutions`, `fused_normalisers`), the names a
study may use in `trials.spec.base`. Standard library only.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NormaliserFacts:
    dense: bool = True  # in MLPs, residual MLPs and attention
    convolutional: bool = False  # in a cnn
    post: bool = False  # may act on an affine map's output
    gain: Literal["inputs", "outputs"] | None = "inputs"  # of what there is a learnable scale with placement pre
    shift: bool = False  # whether a shift comes with the scale
    divides_bias: bool = False  # as it divides W x
    head: str | None = None  # its dense counterpart, in the head of a cnn; None: itself


FACTS: dict[str, NormaliserFacts] = {
    "none": NormaliserFacts(convolutional=True, post=True, gain=None),
    "batch_norm": NormaliserFacts(convolutional=True, post=True, shift=True),
    "layer_norm": NormaliserFacts(convolutional=True, post=True, shift=True),
    "rms_norm": NormaliserFacts(convolutional=True, post=True),
    "norm_like": NormaliserFacts(post=True),
    "affine_like": NormaliserFacts(gain="outputs", divides_bias=True),
    "norm_like_half": NormaliserFacts(),
    "gradient_only": NormaliserFacts(gain=None),
    "group_norm": NormaliserFacts(dense=False, convolutional=True, post=True, shift=True, head="layer_norm"),
    "instance_norm": NormaliserFacts(dense=False, convolutional=True, post=True, shift=True, head="layer_norm"),
    "patch_norm": NormaliserFacts(dense=False, convolutional=True, gain="outputs", head="norm_like"),
    "patch_norm_affine": NormaliserFacts(
        dense=False, convolutional=True, gain="outputs", divides_bias=True, head="affine_like"
    ),
}

DENSE = tuple(name for name, facts in FACTS.items() if facts.dense)
CONVOLUTIONAL = tuple(name for name, facts in FACTS.items() if facts.convolutional)


def in_head(name: str) -> str:
    """What the head of a cnn has where its convolutions have the normaliser `name`."""
    return FACTS[name].head or name
