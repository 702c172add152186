"""An independent witness: the same networks as ordinary PyTorch modules under torch.optim.SGD, one at a time."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.engine import Dataset, Split
from trials.records import Pack, TrialConfig

ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "identity": lambda z: z,
}


class PlainMap(nn.Module):
    """One affine map with its normaliser, on inputs [B, n]."""

    batch_norm: nn.BatchNorm1d

    def __init__(self, weight: Tensor, bias: Tensor, normaliser: str):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.normaliser = normaliser
        self.batch_norm = nn.BatchNorm1d(weight.shape[1], affine=False, dtype=weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        features = x.shape[1:]
        if self.normaliser == "batch_norm":
            x = self.batch_norm(x)
        elif self.normaliser == "layer_norm":
            x = F.layer_norm(x, features, eps=1e-5)
        elif self.normaliser == "rms_norm":
            x = F.rms_norm(x, features, eps=1e-5)
        elif self.normaliser in ("norm_like", "norm_like_half"):
            x = F.normalize(x, dim=1, eps=1e-30)
        if self.normaliser == "gradient_only":
            weight, bias = self.weight.detach(), self.bias.detach()
            weighed = 1 / (x.detach() ** 2).sum(1, keepdim=True).add(1)  # of no value, but of a gradient
            return (
                x @ weight.T + bias + (x.detach() * weighed) @ (self.weight - weight).T + weighed * (self.bias - bias)
            )
        z = x @ self.weight.T + self.bias
        return z / torch.sqrt((x**2).sum(1, keepdim=True) + 1) if self.normaliser == "affine_like" else z


class PlainNetwork(nn.Module):
    def __init__(self, parameters: list[tuple[Tensor, Tensor]], normaliser: str, activation: str):
        super().__init__()
        self.maps = [PlainMap(weight, bias, normaliser) for weight, bias in parameters]
        self.held = nn.ModuleList(self.maps)  # registers them
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.maps
        for one in hidden:
            x = self.activation(one(x))
        return last(x)


def plain_training(
    config: TrialConfig, dataset: Dataset, parameters: list[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> dict[str, list[float]]:
    """Train one trial the ordinary way; the engine's curves, by another road."""
    network = PlainNetwork([(w.to(dtype), b.to(dtype)) for w, b in parameters], config.normaliser, config.activation)
    half = 0.5 if config.normaliser == "norm_like_half" else 1.0
    optimiser = torch.optim.SGD(network.parameters(), lr=config.learning_rate * half, weight_decay=config.weight_decay)
    train, validation, test = (
        (torch.tensor(split.inputs, dtype=dtype), torch.tensor(split.labels))
        for split in (dataset.train, dataset.validation, dataset.test)
    )
    curves: dict[str, list[float]] = {
        m: [] for m in ("train_loss", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy")
    }
    steps = len(train[1]) // config.batch_size
    for epoch in range(config.epochs or 0):
        order = np.random.default_rng([config.seed, epoch]).permutation(len(train[1]))
        network.train()
        losses = []
        for step in range(steps):
            rows = order[step * config.batch_size : (step + 1) * config.batch_size]
            optimiser.zero_grad()
            loss = F.cross_entropy(network(train[0][rows]), train[1][rows])
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        curves["train_loss"].append(sum(losses) / steps)
        network.eval()
        for name, (inputs, labels) in (("validation", validation), ("test", test)):
            with torch.no_grad():
                logits = network(inputs)
            curves[f"{name}_loss"].append(F.cross_entropy(logits, labels).item())
            curves[f"{name}_accuracy"].append((logits.argmax(1) == labels).double().mean().item())
    return curves


def make_pack(seeds: list[int] | None = None, rates: list[float] | None = None, **changes) -> Pack:
    content = {
        "dataset": "digits",
        "path": None,
        "train_samples": None,
        "validation_fraction": 0.15,
        "test_fraction": 0.2,
        "split_seed": 0,
        "model": "mlp",
        "depth": 1,
        "width": 6,
        "activation": "tanh",
        "normaliser": "none",
        "optimiser": "sgd",
        "epochs": 3,
        "last_batch": "drop",
        "batch_size": 4,
        **changes,
    }
    trials = tuple(
        TrialConfig(**content, learning_rate=rate, seed=seed)
        for seed in ([0, 1] if seeds is None else seeds)
        for rate in ([0.005, 0.02, 0.05] if rates is None else rates)
    )
    return Pack("0123456789abcdef", "test", trials)


def make_dataset(train: int = 103, held_out: int = 37, features: int = 13, classes: int = 5, seed: int = 0) -> Dataset:
    """Clusters around random centres: something that can be learnt, and not at once."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((classes, features))

    def split(count: int) -> Split:
        labels = generator.integers(0, classes, count)
        inputs = centres[labels] + 1.5 * generator.standard_normal((count, features))
        return Split(inputs.astype(np.float32), labels.astype(np.int64))

    return Dataset(split(train), split(held_out), split(held_out), classes, f"synthetic-{seed}", (1, 1, features))
