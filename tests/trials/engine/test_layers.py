"""The dense drop-in layers as their users meet them. The convolutions have a test file of their own."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.engine.layers import AffineLikeLinear, GradientOnlyLinear, NormLikeLinear

LAYERS = (NormLikeLinear, AffineLikeLinear, GradientOnlyLinear)
F64 = torch.float64


def formula(layer: Any, x: Tensor) -> Tensor:
    """The layer's forward pass as its docstring has it."""
    weight, bias, gain = layer.weight, 0 if layer.bias is None else layer.bias, layer.gain
    if isinstance(layer, NormLikeLinear):
        u = x / x.norm(dim=-1, keepdim=True)
        return (u if gain is None else u * gain) @ weight.T + bias
    if isinstance(layer, AffineLikeLinear):
        z = (x @ weight.T + bias) / (x.norm(dim=-1, keepdim=True) ** 2 + 1).sqrt()
        return z if gain is None else z * gain
    return x @ weight.T + bias


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (4,), (2, 3, 4), (0,)])
def test_output_is_the_formula_for_any_leading_axes(layer, gain: bool, bias: bool, leading: tuple[int, ...]):
    torch.manual_seed(0)
    made = layer(5, 3, bias, dtype=F64, gain=gain)
    if made.gain is not None:
        nn.init.normal_(made.gain)
    x = torch.randn(*leading, 5, dtype=F64, requires_grad=True)
    z = made(x)
    assert z.shape == (*leading, 3)
    torch.testing.assert_close(z, formula(made, x))
    into_x = torch.autograd.grad(z.square().sum(), x)[0]
    torch.testing.assert_close(into_x, torch.autograd.grad(formula(made, x).square().sum(), x)[0])


@pytest.mark.parametrize(
    ("layer", "bias", "multiple"),
    [
        (NormLikeLinear, True, lambda squared: 2.0),
        (AffineLikeLinear, True, lambda squared: 1.0),
        (GradientOnlyLinear, True, lambda squared: 1.0),
        (nn.Linear, True, lambda squared: squared + 1),
        (NormLikeLinear, False, lambda squared: 1.0),
        (AffineLikeLinear, False, lambda squared: squared / (squared + 1)),
        (GradientOnlyLinear, False, lambda squared: squared / (squared + 1)),
    ],
)
@pytest.mark.parametrize("length", [0.1, 1.0, 30.0])
def test_a_step_of_sgd_moves_the_output_as_documented(layer, bias: bool, multiple, length: float):
    torch.manual_seed(1)
    made, x, target = layer(5, 3, bias, dtype=F64), F.normalize(torch.randn(1, 5, dtype=F64)) * length, torch.ones(1, 3)
    before = made(x)
    ((before - target) ** 2).sum().div(2).backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    g = (before - target).detach()
    torch.testing.assert_close((made(x) - before).detach(), -0.1 * multiple(length**2) * g)


@pytest.mark.parametrize("layer", LAYERS)
def test_initialisation_and_state_are_those_of_nn_linear(layer):
    torch.manual_seed(2)
    reference = nn.Linear(5, 3)
    torch.manual_seed(2)
    made = layer(5, 3, gain=True)
    assert torch.equal(made.weight, reference.weight)
    assert torch.equal(made.bias, reference.bias)
    loaded = layer(5, 3)
    loaded.load_state_dict(reference.state_dict())  # strict
    assert torch.equal(loaded.weight, reference.weight)


@pytest.mark.parametrize("layer", LAYERS)
def test_state_goes_round(layer):
    made, other = layer(5, 3, gain=True), layer(5, 3, gain=True)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(4, 5)
    assert torch.equal(made(x), other(x))
    assert torch.equal(made(x), copy.deepcopy(made)(x))


@pytest.mark.parametrize("layer", [NormLikeLinear, AffineLikeLinear])
def test_a_gain_is_learnable_starts_at_one_and_is_reset_to_it(layer):
    made = layer(5, 3, gain=True)
    assert made.gain.shape == ((5,) if layer is NormLikeLinear else (3,))
    assert made.gain.eq(1).all()
    made(torch.randn(4, 5)).square().sum().backward()
    assert made.gain.grad.abs().min() > 0
    nn.init.normal_(made.gain)
    made.reset_parameters()
    assert made.gain.eq(1).all()
    assert "gain=True" in repr(made)


def test_there_is_no_gain_unless_asked_for_and_none_where_nothing_is_normalised():
    made = [NormLikeLinear(5, 3), AffineLikeLinear(5, 3), GradientOnlyLinear(5, 3, gain=True)]
    for layer in made:
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
        assert "gain" not in repr(layer)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_moves_to_another_type(layer, dtype: torch.dtype):
    made = layer(5, 3, gain=True)
    x = torch.randn(4, 5)
    expected = made(x)
    z = made.to(dtype)(x.to(dtype))
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layer", LAYERS)
def test_training_under_autocast(layer):
    torch.manual_seed(3)
    network = nn.Sequential(layer(5, 8, gain=True), nn.Tanh(), layer(8, 3))
    x, labels = torch.randn(16, 5), torch.arange(16) % 3
    expected = torch.autograd.grad(F.cross_entropy(network(x), labels), list(network.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = network(x)
        loss = F.cross_entropy(z, labels)
    assert z.dtype == torch.bfloat16
    for got, wanted in zip(torch.autograd.grad(loss, list(network.parameters())), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("layer", LAYERS)
def test_frozen_parameters_get_no_gradient(layer):
    made = layer(5, 3)
    made.weight.requires_grad_(False)
    x = torch.randn(4, 5, requires_grad=True)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert made.bias.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("layer", LAYERS)
def test_an_input_of_another_size_is_refused(layer):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(3, 2)(torch.randn(4, 6))  # not read as eight samples
