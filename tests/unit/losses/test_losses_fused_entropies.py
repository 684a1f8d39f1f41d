"""Fused entropies are those of whole scores, with their gradients, and hold only a block."""

from __future__ import annotations

import pytest
import torch
from fused_losses import BLOCKS, SIZES, leaves, tolerance
from largest_tensor import LargestTensor

from composer_mesh.losses.entropy import linear_entropies, token_entropies


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_and_gradients_are_those_of_whole_scores(
    sizes: tuple[int, int, int], block: int, temperature: float, dtype: torch.dtype
) -> None:
    rows, hidden, vocabulary = sizes
    fused = leaves((rows, hidden), (vocabulary, hidden), (vocabulary,), dtype=dtype)
    whole = [one.detach().clone().requires_grad_() for one in fused]
    weights = torch.arange(rows, dtype=dtype)  # the first row has no gradient
    found = linear_entropies(
        fused[0], fused[1], bias=fused[2], temperature=temperature, block=block
    )
    wanted = token_entropies(whole[0] @ whole[1].T + whole[2], temperature)
    torch.testing.assert_close(found, wanted, **tolerance(dtype))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for one, other in zip(fused, whole, strict=True):
        torch.testing.assert_close(one.grad, other.grad, **tolerance(dtype))


def test_gradients_pass_a_numerical_check() -> None:
    inputs = leaves((5, 3), (7, 3), (7,))

    def entropies(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear_entropies(h, w, bias=b, temperature=1.3, block=20)

    assert torch.autograd.gradcheck(entropies, inputs)


def test_no_rows_have_no_entropies() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    found = linear_entropies(torch.ones(0, 3), weight)
    found.sum().backward()
    assert found.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.eq(0).all()


def test_no_tensor_is_as_large_as_all_scores() -> None:
    hidden, weight = leaves((400, 4), (300, 4))
    with LargestTensor() as largest:
        linear_entropies(hidden, weight, block=3000).sum().backward()
    assert largest.numbers <= 3000
