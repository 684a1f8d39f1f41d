"""The policy's entropy and the choice of its most uncertain tokens.

Fused entropies are those of whole scores, with their gradients, and hold only a block.
"""

from __future__ import annotations

import math

import pytest
import torch
from fused_losses import BLOCKS, SIZES, leaves, tolerance
from largest_tensor import LargestTensor

from composer_mesh.losses.entropy import high_entropy_mask, linear_entropies, token_entropies
from composer_mesh.losses.policy import grpo_loss


def test_the_entropy_of_a_token_is_that_of_its_tempered_distribution() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = token_entropies(logits, 2.0)
    for b, t in torch.ones(2, 3).nonzero().tolist():
        weights = [math.exp(x / 2.0) for x in logits[b, t].tolist()]
        shares = [w / sum(weights) for w in weights]
        expected = -sum(p * math.log(p) for p in shares)
        assert found[b, t].item() == pytest.approx(expected, rel=1e-9)


def test_an_entry_that_cannot_be_sampled_adds_nothing_to_the_entropy() -> None:
    found = token_entropies(torch.tensor([[0.0, 0.0, -math.inf]]))
    assert found.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 1.0])
def test_the_most_uncertain_tokens_are_those_at_or_above_the_quantile(fraction: float) -> None:
    rng = torch.Generator().manual_seed(1)
    entropies, mask = torch.rand(6, 9, generator=rng), torch.rand(6, 9, generator=rng) < 0.7
    dirty = torch.where(mask, entropies, math.nan)
    found = high_entropy_mask(dirty, mask, fraction)
    threshold = torch.quantile(entropies[mask], 1 - fraction)
    assert torch.equal(found, mask & (entropies >= threshold))
    assert abs(int(found.sum()) - fraction * int(mask.sum())) <= 1


def test_nothing_is_chosen_where_nothing_is_masked_in() -> None:
    mask = torch.zeros(2, 3).bool()
    assert not high_entropy_mask(torch.ones(2, 3), mask).any()


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"fraction is {fraction} but has to be in \(0, 1\]"):
        high_entropy_mask(torch.ones(2, 3), torch.ones(2, 3).bool(), fraction)


def test_as_weights_the_choice_takes_the_gradient_from_all_other_tokens() -> None:
    logprobs = torch.full((1, 5), -1.0, requires_grad=True)
    entropies, mask = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3]]), torch.ones(1, 5).bool()
    chosen = high_entropy_mask(entropies, mask, 0.4)
    grpo_loss(
        logprobs, logprobs, torch.ones(1), mask, normalizer=5, sampling_weights=chosen.float()
    ).loss.backward()
    assert logprobs.grad[0].tolist() == pytest.approx([0, -0.2, 0, -0.2, 0])


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
