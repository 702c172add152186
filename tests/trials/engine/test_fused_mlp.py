"""The model's outputs and hand-written updates against autograd, and its initialisation."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trials.engine.plain import ACTIVATIONS, PlainNetwork
from trials.engine.fused_mlp import MLP, initial_parameters

NORMALISERS = ("none", "batch_norm", "layer_norm", "rms_norm", "norm_like", "affine_like")
F64 = torch.float64


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [[], [4], [4, 4, 4]])
def test_one_update_of_the_later_maps_and_the_first_maps_gradient_equal_autograd(normaliser, activation, hidden):
    sizes = [5, *hidden, 3]
    model = MLP(sizes, activation, normaliser, [3, 8], 2, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(2, 6, 5, dtype=F64, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])
    plain = [
        PlainNetwork([(w.clone(), b.clone()) for w, b in model.parameters(lane)], normaliser, activation)
        for lane in range(4)
    ]
    inputs = model.input_buffer(2, 6)
    model.normalisers[0].train(rows.mT, model.augmented(inputs))
    logits = model.train_forward(model.weights[0] @ inputs.mT)
    gradient = torch.softmax(logits, 1) - F.one_hot(labels, 3).to(F64).T
    first_step = model.train_backward(gradient) @ inputs
    assert not first_step[..., 6:].any()  # the padding stays zero
    for lane, network in enumerate(plain):
        expected = network(rows[lane // 2])
        torch.testing.assert_close(logits[lane].mT, expected)
        F.cross_entropy(expected, labels, reduction="sum").backward()
        for index, one in enumerate(network.maps):
            assert one.weight.grad is not None
            assert one.bias.grad is not None
            step = torch.cat([one.weight.grad, one.bias.grad[:, None]], 1)
            if index == 0:
                got = first_step[lane // 2].view(2, -1, model.padded)[lane % 2, :, :6]
            else:
                got = torch.cat([one.weight, one.bias[:, None]], 1) - model.weights[index][lane]
            torch.testing.assert_close(got, step)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("hidden", [[], [4], [4, 4]])
def test_evaluation_equals_plain_modules(normaliser, hidden):
    model = MLP([5, *hidden, 3], "relu", normaliser, [3, 8], 2)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    logits = model.evaluate(rows)
    for lane in range(4):
        network = PlainNetwork([(w.clone(), b.clone()) for w, b in model.parameters(lane)], normaliser, "relu").eval()
        torch.testing.assert_close(logits[lane].mT, network(rows))


def test_initialisation_follows_the_seed_alone():
    sizes = [5, 4, 3]
    wanted = initial_parameters(sizes, 7)
    for normaliser, activation, seeds, lanes in itertools.product(
        NORMALISERS, ("tanh", "gelu"), ([7], [7, 2], [1, 2, 7]), (1, 3)
    ):
        torch.manual_seed(len(seeds))  # the global generator must not matter
        model = MLP(sizes, activation, normaliser, seeds, lanes)
        for place in range(lanes):
            for got, expected in zip(model.parameters(seeds.index(7) * lanes + place), wanted, strict=True):
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1], expected[1])
    other = initial_parameters(sizes, 8)
    assert not torch.equal(other[0][0], wanted[0][0])


def test_initialisation_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    initial_parameters([5, 4, 3], 7)
    assert torch.equal(torch.get_rng_state(), state)


def test_initialisation_has_the_distribution_of_nn_linear():
    fan_in = 400
    torch.manual_seed(0)
    reference = nn.Linear(fan_in, 2000)
    ((weight, bias),) = initial_parameters([fan_in, 2000], 11)
    for got, expected in ((weight, reference.weight), (bias, reference.bias)):
        bound = fan_in**-0.5
        assert got.abs().max() <= bound
        grid = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
        sample = got.flatten()[:100_000]
        other = expected.detach().flatten()[:100_000]
        tolerance = 5 * bound / len(sample) ** 0.5
        torch.testing.assert_close(sample.quantile(grid), other.quantile(grid), rtol=0, atol=tolerance)


def test_squared_norms_tell_which_lane_is_not_finite():
    model = MLP([5, 4, 3], "tanh", "none", [0, 1], 2)
    model.weights[1][2, 0, 0] = torch.nan
    model.weights[0][0, 1, 0] = 1e30  # lane 0: finite, but its square is not
    assert model.squared_norms().isfinite().tolist() == [False, True, False, True]


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="softplus"):
        MLP([5, 4, 3], "softplus", "none", [0], 1)
