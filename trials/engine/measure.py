"""How many lanes at once: measured, not guessed, as it hangs on caches, memory and launches.

On a CPU small batches are bound by memory traffic on the first map's weights, so the best number
is the one whose weights stay in cache; on a GPU it is as many as fit. Libraries may round
differently for other numbers of lanes, so the caller keeps the answer with the study: a resumed
study trains as it began.
"""

import time
from collections.abc import Callable

import torch

from trials.engine.dataset import Dataset
from trials.engine.errors import is_out_of_memory
from trials.engine.train import PackRun
from trials.records import Pack

CACHE_BYTES = 2**20  # of weights: packs up to this size are in cache whole, and are not measured
WORTH_SECONDS = 20.0  # a pack that would take less by this measurement's first figure is not measured further
_MARGIN = 1.1  # a smaller block must be this much faster
_MOST_CANDIDATES = 4
_SAMPLES = 512  # per measurement, at least


def choose_lanes_at_once(pack: Pack, dataset: Dataset, device: torch.device | str = "cpu") -> int:
    """The number of lanes of `pack` to train side by side: all, a half, a quarter … of them.

    Trains some steps of each candidate on networks that are thrown away. Where memory does not
    suffice for a candidate, the next smaller one is tried.
    """
    lanes = len(pack.trials)
    if lanes == 1:
        return 1
    best, best_speed = 0, 0.0
    at_once, measured = lanes, 0
    while measured < _MOST_CANDIDATES:
        try:
            speed, is_worth_it = _measured(pack, dataset, device, at_once)
        except Exception as error:
            if not is_out_of_memory(error) or at_once == 2:
                raise
        else:
            measured += 1
            if at_once == lanes and not is_worth_it:
                return lanes
            if speed > best_speed * (_MARGIN if best else 0):
                best, best_speed = at_once, speed
        if at_once == 2:
            break
        at_once = fewer(at_once)
    return best


def fewer(at_once: int) -> int:
    """Half as many lanes at once; two are the fewest that train side by side."""
    return max(2, at_once // 2)


def _measured(pack: Pack, dataset: Dataset, device: torch.device | str, at_once: int) -> tuple[float, bool]:
    """The speed of `at_once` lanes, and whether the pack is large and long enough for the others to be measured.

    A function of its own, so that one candidate's memory has gone before the next one's comes.
    """
    run = PackRun(pack, dataset, device, lanes_at_once=at_once)
    lanes = len(pack.trials)
    if run.device.type == "cpu" and run.bytes_per_lane * lanes <= CACHE_BYTES:
        return 0.0, False
    speed = _speed(run, dataset)
    return speed, run.updates * pack.config.batch_size * lanes >= WORTH_SECONDS * speed


def _speed(run: PackRun, dataset: Dataset) -> float:
    """Samples × lanes per second of the run's first block."""
    block, trainer = run.blocks[0]
    batch = run.pack.config.batch_size
    steps = max(1, min(run.updates, run.steps, max(2, _SAMPLES // batch)))
    orders = torch.arange(steps * batch, device=run.device).expand(len(block.groups), -1)
    work: Callable[[], object] = lambda: trainer.train(orders, 0)  # noqa: E731
    work()  # buffers are made, a graph is captured
    started = _clock(run.device)
    work()
    return steps * batch * len(block.owners) / max(_clock(run.device) - started, 1e-9)


def _clock(device: torch.device) -> float:
    """Seconds: of this process on a CPU, which other processes on the node cannot lengthen by much."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()
