"""The first map's products: the same numbers by oneDNN and without it, and a row's whatever is beside it."""

import pytest
import torch

from trials.engine import products

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


@pytest.fixture(autouse=True, params=["onednn", "torch"])
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if request.param == "torch":
        monkeypatch.setattr(products, "_linear", None)
    assert products.uses_onednn(draw(1, 600)) == (request.param == "onednn")
    assert not products.uses_onednn(draw(1, 64))
    assert not products.uses_onednn(draw(1, 600).double())


@pytest.mark.parametrize("features", [64, 1040])
def test_products_are_torchs_own_in_float64(features: int):
    weight, inputs, steps = draw(3, 20, features), draw(3, 32, features), draw(3, 20, 32)
    expected = weight.double() @ inputs.double().mT
    room = torch.empty(3, 20, 32)
    assert products.product(weight, inputs, room) is room
    torch.testing.assert_close(room.double(), expected, rtol=1e-4, atol=1e-3)
    shared = products.product(weight, inputs[1])
    torch.testing.assert_close(shared.double(), weight.double() @ inputs[1].double().mT, rtol=1e-4, atol=1e-3)
    moved = weight.double() - steps.double() @ inputs.double()
    products.subtract_product(weight, steps, inputs)
    torch.testing.assert_close(weight.double(), moved, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_stays_in_its_row():
    weight, inputs = draw(1, 8, 1040), draw(1, 16, 1040)
    clean = products.product(weight, inputs)
    weight[0, 3, 7] = torch.nan
    ruined = products.product(weight, inputs)
    others = [row for row in range(8) if row != 3]
    assert not bool(ruined[0, 3].isfinite().any())
    torch.testing.assert_close(ruined[0, others], clean[0, others], rtol=0, atol=0)
