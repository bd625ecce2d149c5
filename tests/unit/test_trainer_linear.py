"""Fast linear layers against torch's own."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laminar.trainer.linear import FastLinear, use_fast_linear


def layers(num_inputs: int, num_outputs: int, *, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(num_inputs, num_outputs, bias=bias)
    fast = copy.deepcopy(plain)
    use_fast_linear(nn.Sequential(fast))
    assert type(fast) is FastLinear
    return plain, fast


def outcome(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """The product, then the gradients of the inputs, the weights and the biases."""
    x = x.detach().requires_grad_()
    product = layer(x)
    (product * torch.linspace(0.5, 2.0, product.numel()).view_as(product)).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [product, *(gradient for gradient in gradients if gradient is not None)]


@settings(max_examples=50, deadline=None)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    num_inputs=st.integers(1, 70),
    num_outputs=st.integers(1, 70),
    bias=st.booleans(),
)
def test_products_and_gradients_are_those_of_torch(leading: list[int], num_inputs: int, num_outputs: int, bias: bool):
    plain, fast = layers(num_inputs, num_outputs, bias=bias)
    x = torch.randn(*leading, num_inputs)
    torch.testing.assert_close(outcome(fast, x), outcome(plain, x), rtol=1e-4, atol=1e-4)


def test_inputs_may_be_views_of_any_order():
    plain, fast = layers(40, 24, bias=True)
    for x in (torch.randn(40, 30).t(), torch.randn(1, 40).expand(9, 40), torch.randn(30, 80)[:, ::2]):
        torch.testing.assert_close(outcome(fast, x), outcome(plain, x), rtol=1e-4, atol=1e-4)


def test_frozen_parts_get_no_gradient():
    _, fast = layers(8, 8, bias=True)
    fast.weight.requires_grad_(False)
    outcome(fast, torch.randn(3, 8))
    assert fast.weight.grad is None
    assert fast.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_left_to_torch(dtype: torch.dtype):
    plain, fast = layers(8, 8, bias=True)
    plain.to(dtype)
    fast.to(dtype)
    x = torch.randn(3, 8, dtype=dtype)
    assert torch.equal(fast(x), plain(x))


def test_autocast_is_obeyed():
    _, fast = layers(8, 8, bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast(torch.randn(3, 8)).dtype == torch.bfloat16


def test_what_is_saved_does_not_change():
    plain, fast = layers(8, 8, bias=True)
    assert fast.state_dict().keys() == plain.state_dict().keys()
