"""Fused matrices in whatever memory layout: the product, the sum, and a second load."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laminar.engines.projection import CACHED_BYTES, FEW_ROWS, Projection

CPU = torch.device("cpu")
CACHED, LARGE = (24, [16, 8, 8]), (512, [400, 300])
assert 4 * CACHED[0] * sum(CACHED[1]) <= CACHED_BYTES < 4 * LARGE[0] * sum(LARGE[1])

sizes = pytest.mark.parametrize("size", [CACHED, LARGE], ids=["cached", "large"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def loaded(size: tuple[int, list[int]], *, bias: bool, dtype: torch.dtype, seed: int) -> tuple[Projection, Tensor]:
    """A projection, and its weights and biases as one matrix [N, K + 1] in float64."""
    num_inputs, num_outputs = size
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(rows, num_inputs, generator=random) for rows in num_outputs]
    biases = [torch.randn(rows, generator=random) * float(bias) for rows in num_outputs]
    projection = Projection(num_inputs, num_outputs, bias=bias, dtype=dtype, device=CPU)
    projection.load_weights(weights)
    if bias:
        projection.load_biases(biases)
    return projection, torch.cat([torch.cat(weights), torch.cat(biases).unsqueeze(1)], 1).to(dtype).double()


def expected(x_RK: Tensor, both: Tensor, onto_RN: Tensor | None) -> Tensor:
    product = x_RK.double() @ both[:, :-1].t() + both[:, -1]
    return product if onto_RN is None else product + onto_RN.double()


@sizes
@dtypes
@settings(max_examples=25)
@given(rows=st.integers(1, 3 * FEW_ROWS), bias=st.booleans(), adds=st.booleans(), seed=st.integers(0, 99))
def test_a_projection_is_x_w_t_plus_b_plus_what_it_is_added_to(
    size: tuple[int, list[int]], dtype: torch.dtype, rows: int, bias: bool, adds: bool, seed: int
) -> None:
    projection, both = loaded(size, bias=bias, dtype=dtype, seed=seed)
    x_RK = torch.randn(rows, size[0]).to(dtype)
    onto_RN = torch.randn(rows, sum(size[1])).to(dtype) if adds else None
    before = None if onto_RN is None else onto_RN.clone()
    got = projection(x_RK, onto_RN)
    assert got.dtype == dtype
    scale = size[0] ** 0.5
    tolerance = scale * (1e-5 if dtype == torch.float32 else 3e-2)
    assert (got.double() - expected(x_RK, both, onto_RN)).abs().max() < tolerance
    assert before is None or torch.equal(before, onto_RN), "what it is added to stays as it was"


@sizes
def test_a_second_load_leaves_nothing_of_the_first(size: tuple[int, list[int]]) -> None:
    projection, _ = loaded(size, bias=False, dtype=torch.float32, seed=0)
    other, _ = loaded(size, bias=False, dtype=torch.float32, seed=1)
    random = torch.Generator().manual_seed(1)
    projection.load_weights([torch.randn(rows, size[0], generator=random) for rows in size[1]])
    for rows in (1, 3 * FEW_ROWS):
        x_RK = torch.randn(rows, size[0])
        assert torch.equal(projection(x_RK), other(x_RK))


@sizes
@dtypes
def test_weights_that_change_after_the_load_do_not_change_the_product(
    size: tuple[int, list[int]], dtype: torch.dtype
) -> None:
    """A version is read from shared memory that is given back and used again."""
    projection = Projection(*size, bias=True, dtype=dtype, device=CPU)
    weights = [torch.randn(rows, size[0], dtype=dtype) for rows in size[1]]
    biases = [torch.randn(rows, dtype=dtype) for rows in size[1]]
    projection.load_weights(weights)
    projection.load_biases(biases)
    x_RK = torch.randn(3 * FEW_ROWS, size[0], dtype=dtype)
    before = projection(x_RK).clone(), projection(x_RK[:1]).clone()
    for tensor in (*weights, *biases):
        tensor.zero_()
    assert torch.equal(before[0], projection(x_RK))
    assert torch.equal(before[1], projection(x_RK[:1]))
