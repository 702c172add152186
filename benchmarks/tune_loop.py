"""Ray Tune as one would use it by itself: one trial per training, each a plain PyTorch loop.

Tune is given every advantage that costs no engine: warm actors that are used again, the data once in
the object store, one thread per actor, one report per trial instead of one per epoch, no checkpoints,
no logger callbacks, no MLflow.
"""

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
import torch.nn.functional as F
from ray import tune
from torch import Tensor, nn

from trials.engine import Dataset
from trials.engine.networks import make_network
from trials.records import TrialConfig


class PlainTrial(tune.Trainable):
    """One trial, trained in one step; reports its last losses and when it began and ended."""

    def setup(self, config: dict[str, Any], **shared: Any) -> None:
        torch.set_num_threads(1)
        self._dataset: Dataset = shared["dataset"]
        self._trials: Sequence[TrialConfig] = shared["trials"]
        self._trial = self._trials[config["trial"]]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trial = self._trials[new_config["trial"]]
        return True

    def step(self) -> dict[str, Any]:
        began = time.time()
        metrics = train(self._trial, self._dataset)
        return {**metrics, "key": self._trial.key, "began": began, "ended": time.time(), "done": True}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        return None

    def load_checkpoint(self, checkpoint: Any) -> None:
        return None


def run_tune(trials: Sequence[TrialConfig], dataset: Dataset, cores: int) -> tuple[float, float, dict[str, float]]:
    """Train the trials on a Ray of this process's own.

    Returns:
        Seconds until the first trial began (actors start, once per study); seconds from there to the
        end; each trial's last training loss by its key.
    """
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the files of the loggers that are off
    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with tempfile.TemporaryDirectory(prefix="normstudy-bench-") as scratch:
            tuner = tune.Tuner(
                tune.with_parameters(PlainTrial, trials=tuple(trials), dataset=dataset),
                param_space={"trial": tune.grid_search(list(range(len(trials))))},
                tune_config=tune.TuneConfig(reuse_actors=True),
                run_config=tune.RunConfig(
                    storage_path=scratch,
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            )
            began = time.time()
            with contextlib.redirect_stdout(sys.stderr):  # Tune's greeting
                results = tuner.fit()
            ended = time.time()
        metrics = [result.metrics or {} for result in results]
    finally:
        ray.shutdown()
    if results.errors:
        raise RuntimeError(f"{len(results.errors)} of Tune's trials failed: {results.errors[0]}")
    first = min(found["began"] for found in metrics)
    return first - began, ended - first, {found["key"]: found["train_loss"] for found in metrics}


def train(trial: TrialConfig, dataset: Dataset) -> dict[str, float]:
    """All epochs of one trial, with both held-out splits evaluated after each, as a study does."""
    parameters = make_network(trial, dataset.shape, dataset.classes).initial(trial.seed)
    values = list(parameters.values())
    network = nn.Sequential()
    for weight, bias in zip(values[::2], values[1::2], strict=True):
        if len(network):
            network.append(nn.Tanh())
        network.append(_Map(weight, bias, trial.normaliser))
    optimiser = torch.optim.SGD(network.parameters(), lr=trial.step_size)
    (inputs, labels), *held_out = (
        (torch.tensor(split.inputs), torch.tensor(split.labels))
        for split in (dataset.train, dataset.validation, dataset.test)
    )
    steps, metrics = len(labels) // trial.batch_size, {}
    for epoch in range(trial.epochs or 0):
        order = torch.from_numpy(np.random.default_rng([trial.seed, epoch]).permutation(len(labels)))
        total = torch.zeros(())
        network.train()
        for rows in order[: steps * trial.batch_size].split(trial.batch_size):
            optimiser.zero_grad(set_to_none=True)
            loss = F.cross_entropy(network(inputs.index_select(0, rows)), labels.index_select(0, rows))
            loss.backward()
            optimiser.step()
            total += loss.detach()
        metrics = {"train_loss": float(total) / steps}
        network.eval()
        with torch.inference_mode():
            for name, (x, y) in zip(("validation", "test"), held_out, strict=True):
                logits = network(x)
                metrics[f"{name}_loss"] = F.cross_entropy(logits, y).item()
                metrics[f"{name}_accuracy"] = (logits.argmax(1) == y).float().mean().item()
    return metrics


class _Map(nn.Module):
    """A normaliser and the affine map after it."""

    def __init__(self, weight: Tensor, bias: Tensor, normaliser: str):
        super().__init__()
        outputs, inputs = weight.shape
        self.linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            self.linear.bias.copy_(bias)
        self.before: nn.Module = {
            "none": nn.Identity,
            "affine_like": nn.Identity,
            "norm_like": _NormLike,
            "batch_norm": lambda: nn.BatchNorm1d(inputs, affine=False),
            "layer_norm": lambda: nn.LayerNorm(inputs, elementwise_affine=False),
            "rms_norm": lambda: nn.RMSNorm(inputs, eps=1e-5, elementwise_affine=False),
        }[normaliser]()
        self.is_affine_like = normaliser == "affine_like"

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(self.before(x))
        return z * (x.square().sum(-1, keepdim=True) + 1).rsqrt() if self.is_affine_like else z


class _NormLike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=1e-30)
