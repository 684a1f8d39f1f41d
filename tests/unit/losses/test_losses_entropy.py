"""The policy's entropy and the choice of its most uncertain tokens."""

import math

import pytest
import torch

from composer_mesh.losses.policy import grpo_loss, high_entropy_mask, token_entropies


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
