"""The pack in JAX: `jit(vmap(scan))`, one compiled call per order of samples. Needs the `bench` extra."""

import os
from typing import Any

import numpy as np

from benchmarks.contenders import initial_parameters
from trials.engine import Dataset
from trials.records import Pack

# One thread, as every other contender has; read when JAX makes its client.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]


class JaxLanes:
    """Lanes mapped over parameters and learning rate, seeds over the order as well; parameters are donated."""

    def __init__(self, pack: Pack, dataset: Dataset):
        batch, affine_like = pack.config.batch_size, pack.config.normaliser == "affine_like"
        lanes = initial_parameters(pack, dataset)
        grid = (len(pack.seeds), len(pack.settings))
        self._batch = batch
        self._parameters: Any = tuple(
            jnp.array(np.stack([value.numpy() for value in values]).reshape(*grid, *values[0].shape))
            for values in zip(*(lane.values() for lane in lanes), strict=True)
        )
        self._rates = jnp.array(np.array([t.learning_rate for t in pack.trials], np.float32).reshape(grid))
        self._inputs, self._labels = jnp.array(dataset.train.inputs), jnp.array(dataset.train.labels.astype(np.int32))

        def affine(x: Any, weight: Any, bias: Any) -> Any:
            z = x @ weight.T + bias
            return z * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1) if affine_like else z

        def loss(parameters: Any, x: Any, y: Any) -> Any:
            w1, b1, w2, b2 = parameters
            logits = affine(jnp.tanh(affine(x, w1, b1)), w2, b2)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

        def train_lane(parameters: Any, rate: Any, inputs: Any, labels: Any, order: Any) -> Any:
            def step(parameters: Any, rows: Any) -> Any:
                value, gradient = jax.value_and_grad(loss)(parameters, inputs[rows], labels[rows])
                return jax.tree.map(lambda p, g: p - rate * g, parameters, gradient), value

            parameters, losses = jax.lax.scan(step, parameters, order)
            return parameters, losses.sum()

        of_seed = jax.vmap(train_lane, in_axes=(0, 0, None, None, None))
        self._train = jax.jit(jax.vmap(of_seed, in_axes=(0, 0, None, None, 0)), donate_argnums=0)

    def train(self, orders: np.ndarray) -> np.ndarray:
        steps = jnp.array(orders.reshape(len(orders), -1, self._batch).astype(np.int32))
        self._parameters, losses = self._train(self._parameters, self._rates, self._inputs, self._labels, steps)
        return np.asarray(losses, np.float64).ravel() * self._batch
