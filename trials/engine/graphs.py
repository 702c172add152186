"""CUDA graphs of training steps, and the numerics trials run under.

A small network's step is some forty kernels of a microsecond each: on a GPU launching them takes
longer than running them. A graph is launched once for all of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UP_RUNS = 3  # PyTorch's own number: libraries choose their algorithms and take their memory in the first runs


class Captured:
    """A function without arguments that reads and writes the same tensors at every call.

    On the CPU a call calls the function. On CUDA the first call runs it three times on a side stream
    (a capture must not be the first to use a library) and captures it; every call replays the
    capture. The first call, too, has the effect of one run: what the warm-up changed is put back.

    A replay runs the same kernels on the same memory, so the function must not wait for the device
    (`item`, `tolist`, masks as indices), shapes are those of the first call, and whatever differs
    between calls (rows of a batch, the factor of a schedule, a count of steps) has to live in tensors
    that are written in place. The graph keeps the memory of its temporaries for as long as it lives.

    Not measured, and its CUDA branch not run: there was no GPU where this was written (`test_general` has its test).

    Args:
        function: what to run; its result is the tensor it returns. Let it hold tensors and not the
            owner of this object: a cycle would keep both alive, and their memory.
        changed: every tensor that the function changes and a later call reads: parameters,
            running statistics, optimiser state, sums. Temporaries need not be listed.
    """

    def __init__(self, function: Callable[[], Tensor], changed: Sequence[Tensor]):
        self._function, self._changed = function, tuple(changed)
        self._device = self._changed[0].device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        """Run once. On CUDA every call writes to, and returns, the same tensor: copy what is to be kept."""
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None or self._result is None:
            self._graph, self._result = self._capture()
        self._graph.replay()
        return self._result

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                without_effect(self._function, self._changed, _WARM_UP_RUNS)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self._function()
        return graph, result


@torch.no_grad()
def without_effect(function: Callable[[], object], changed: Sequence[Tensor], runs: int) -> None:
    """Run a function `runs` times and give the tensors it changes their values back, to the last bit."""
    before = [tensor.detach().clone() for tensor in changed]
    for _ in range(runs):
        function()
    for tensor, value in zip(changed, before, strict=True):
        tensor.copy_(value)


def set_numerics(device: torch.device | str) -> None:
    """Make CUDA compute in full float32 and repeatably, for the whole process; on the CPU nothing is to be set.

    - TF32 off: it keeps 10 bits of the 23 of float32, so that products on a GPU would be a thousand
      times coarser than on a CPU, by default in convolutions alone. What normalisers differ in must
      not depend on where a study ran.
    - cuDNN's deterministic algorithms only: others add up in an order that changes from run to run,
      and a rerun must give the same bits.
    - cuDNN's benchmark off: it would choose algorithms by their time, so differently in a rerun.

    Not measured: there was no GPU where this was written.
    """
    if torch.device(device).type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
