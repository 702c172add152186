"""What the engine is measured against, each as good as a careful user would write it.

A contender trains the lanes of one pack, seeds × learning rates of an MLP, under plain SGD. `train`
takes the rows of each seed's samples, [seeds, n] with n a multiple of the batch size, goes over them
in batches, keeps what it has learnt, and returns the sum over the samples of each lane's losses, [lanes].
All hold the data resident, take batches by index and use no DataLoader.
"""

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.engine import Dataset, PackRun
from trials.engine.networks import make_network
from trials.records import Pack


class Contender(Protocol):
    def train(self, orders: np.ndarray) -> np.ndarray: ...


def initial_parameters(pack: Pack, dataset: Dataset) -> list[dict[str, Tensor]]:
    """Each lane's parameters as the engine draws them."""
    network = make_network(pack.config, dataset.shape, dataset.classes)
    return [network.initial(trial.seed) for trial in pack.trials]


class Engine:
    """The product: a `PackRun`'s blocks, without the evaluation after each epoch."""

    def __init__(self, pack: Pack, dataset: Dataset, lanes_at_once: int | None = None, device: str = "cpu"):
        self._run = PackRun(pack, dataset, device, lanes_at_once=lanes_at_once)
        self._row = {seed: row for row, seed in enumerate(pack.seeds)}

    def train(self, orders: np.ndarray) -> np.ndarray:
        run = self._run
        losses = np.zeros(len(run.pack.trials))
        rows = torch.from_numpy(orders).to(run.device)
        for block, trainer in run.blocks:
            of_seed = [self._row[run.pack.trials[group[0]].seed] for group in block.groups]
            found = trainer.train(rows[of_seed], 0).cpu()
            for place, lane in block.owners.items():
                losses[place] = found[lane]
        return losses


class PlainLoop:
    """One model at a time: modules, `torch.optim.SGD`, the ordinary loop. Lanes run one after the other."""

    def __init__(self, pack: Pack, dataset: Dataset, device: str = "cpu"):
        self._device, self._pack = device, pack
        self._row = {seed: row for row, seed in enumerate(pack.seeds)}
        self._inputs = torch.from_numpy(dataset.train.inputs).to(device)
        self._labels = torch.from_numpy(dataset.train.labels).to(device)
        self._models = [_Network(p, pack.config.normaliser).to(device) for p in initial_parameters(pack, dataset)]
        self._optimisers = [
            torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
            for model, trial in zip(self._models, pack.trials, strict=True)
        ]

    def train(self, orders: np.ndarray) -> np.ndarray:
        losses = []
        for model, optimiser, trial in zip(self._models, self._optimisers, self._pack.trials, strict=True):
            rows = torch.from_numpy(orders[self._row[trial.seed]]).to(self._device)
            total = torch.zeros((), device=self._device)
            for batch in rows.split(trial.batch_size):
                optimiser.zero_grad(set_to_none=True)
                x, y = self._inputs.index_select(0, batch), self._labels.index_select(0, batch)  # faster than [batch]
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimiser.step()
                total += loss.detach()
            losses.append(float(total) * trial.batch_size)
        return np.array(losses)


class _Network(nn.Module):
    def __init__(self, parameters: dict[str, Tensor], normaliser: str):
        super().__init__()
        first, last = list(parameters.values())[::2]
        self.first, self.last = nn.Linear(first.shape[1], first.shape[0]), nn.Linear(last.shape[1], last.shape[0])
        with torch.no_grad():
            for mine, value in zip(self.parameters(), parameters.values(), strict=True):
                mine.copy_(value)
        self._affine_like = normaliser == "affine_like"

    def forward(self, x: Tensor) -> Tensor:
        return self._map(self.last, torch.tanh(self._map(self.first, x)))

    def _map(self, linear: nn.Linear, x: Tensor) -> Tensor:
        z = linear(x)
        return z * (x.square().sum(-1, keepdim=True) + 1).rsqrt() if self._affine_like else z


class Vmap:
    """`torch.func.vmap` over stacked parameters, with functional SGD; lanes of a seed share their batches."""

    def __init__(self, pack: Pack, dataset: Dataset):
        self._batch = pack.config.batch_size
        self._inputs, self._labels = torch.from_numpy(dataset.train.inputs), torch.from_numpy(dataset.train.labels)
        lanes = initial_parameters(pack, dataset)
        grid = (len(pack.seeds), len(pack.settings))
        # [seeds, rates, ...] each
        self._parameters = tuple(
            torch.stack(values).unflatten(0, grid) for values in zip(*(lane.values() for lane in lanes), strict=True)
        )
        self._rates = torch.tensor([trial.learning_rate for trial in pack.trials]).view(grid)
        affine_like = pack.config.normaliser == "affine_like"

        def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            z = F.linear(x, weight, bias)
            return z * (x.square().sum(-1, keepdim=True) + 1).rsqrt() if affine_like else z

        def loss(parameters: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            w1, b1, w2, b2 = parameters
            return F.cross_entropy(affine(torch.tanh(affine(x, w1, b1)), w2, b2), y)

        lane_step = torch.func.grad_and_value(loss)
        self._step = torch.func.vmap(torch.func.vmap(lane_step, in_dims=(0, None, None)), in_dims=(0, 0, 0))

    def train(self, orders: np.ndarray) -> np.ndarray:
        total = torch.zeros(self._rates.shape)
        for rows in torch.from_numpy(orders).split(self._batch, dim=1):
            gradients, losses = self._step(self._parameters, self._inputs[rows], self._labels[rows])
            for value, gradient in zip(self._parameters, gradients, strict=True):
                value.sub_(gradient.mul_(self._rates.view(*self._rates.shape, *[1] * (value.ndim - 2))))
            total += losses
        return total.flatten().double().numpy() * self._batch
