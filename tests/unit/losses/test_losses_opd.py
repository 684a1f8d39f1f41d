"""Entropy-aware distillation against plain definitions: the hard gate and our soft one.

The policy's entropy and the choice of its most uncertain tokens.

Fused entropies are those of whole scores, with their gradients, and hold only a block.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_losses import BLOCKS, SIZES, leaves, tolerance
from largest_tensor import LargestTensor
from torch import Tensor

from composer_mesh.losses.distillation import (
    entropy,
    entropy_gated_kl,
    entropy_opd_loss,
    generalized_jsd,
)
from composer_mesh.losses.entropy import high_entropy_mask, linear_entropies, token_entropies
from composer_mesh.losses.policy import grpo_loss

FLOATS = [(torch.float64, 1e-9, 1e-11), (torch.float32, 5e-5, 2e-6)]


def batch(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits, teacher logits and a mask of [3, 4] tokens over 6 entries, in float64."""
    rng = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, 3, 4, 6, generator=rng, dtype=torch.float64)
    student, teacher = scores.clamp(-50, 50)
    return student.requires_grad_(), teacher, torch.rand(3, 4, generator=rng) < 0.7


def sampling(student: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Sampled ids and log-probs of a student that has since moved by about 0.3 nats."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randint(6, (3, 4), generator=rng)
    new = student.detach().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    old = new - 0.3 * torch.randn(3, 4, generator=rng, dtype=torch.float64)
    return {"targets": targets, "old_logprobs": old}


def probabilities(row: Tensor) -> Tensor:
    weights = (row - row.max().detach()).exp()
    return weights / weights.sum()


def opd_by_hand(
    student: Tensor, teacher: Tensor, mask: Tensor, extra: dict[str, Tensor], full: bool
) -> tuple[Tensor, Tensor]:
    """Sums of the policy gradient and of the gated forward KL, at tau 1, k 3, clips 0.1 and 0.3."""
    pg = soft = torch.zeros((), dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        s, p = probabilities(student[b, t]), probabilities(teacher[b, t])
        target, old = int(extra["targets"][b, t]), extra["old_logprobs"][b, t].item()
        advantage = math.log(p[target].item()) - old
        ratio = s[target] / math.exp(old)
        pg = pg - min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        if -sum(x * math.log(x) for x in p.tolist()) >= 1.0:
            ids = sorted(range(6), key=lambda v: -p[v].item())[:3]
            top, kept = p[ids] / p[ids].sum(), s[ids] if full else s[ids] / s[ids].sum()
            soft = soft + (top * (top / kept).log()).sum()
    return pg, soft


@pytest.mark.parametrize(("dtype", "rtol", "atol"), FLOATS)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("coef", [0.0, 0.7])
def test_value_and_gradient_agree_with_the_definition(
    coef: float, full: bool, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    student, teacher, mask = batch(seed=3)
    extra = sampling(student)
    pg, soft = opd_by_hand(student, teacher, mask, extra, full)
    expected = pg / 5 + coef * soft / (5 + 1e-8)
    (wanted,) = torch.autograd.grad(expected, student)
    single = student.detach().to(dtype).requires_grad_()
    found = entropy_opd_loss(
        single,
        teacher.to(dtype),
        mask,
        targets=extra["targets"],
        old_logprobs=extra["old_logprobs"].to(dtype),
        tau=1.0,
        coef=coef,
        top_k=3,
        clip_low=0.1,
        clip_high=0.3,
        student_full_vocab=full,
        normalizer=5,
    )
    found.backward()
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(single.grad.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("tokens", [5, None])
def test_by_sequence_each_sequence_counts_its_own_mean(tokens: int | None) -> None:
    student, teacher, mask = batch(seed=3)
    mask[1] = False  # a sequence without a token adds nothing
    extra = sampling(student)
    pg = soft = soft_means = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        alone = mask & (torch.arange(3) == row)[:, None]
        terms = opd_by_hand(student, teacher, alone, extra, full=True)
        count = max(int(mask[row].sum()), 1)
        pg, soft_means = pg + terms[0] / count, soft_means + terms[1] / count
        soft = soft + terms[1]
    found = entropy_opd_loss(
        student,
        teacher,
        mask,
        **extra,
        tau=1.0,
        top_k=3,
        clip_low=0.1,
        clip_high=0.3,
        aggregation="grpo",
        normalizer=2,
        soft_normalizer=tokens,
    )
    expected = pg / 2 + (soft_means / 2 if tokens is None else soft / tokens)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-11)


def test_an_entropy_at_the_threshold_opens_the_gate() -> None:
    """A uniform teacher over two entries has an entropy of exactly log 2."""
    student = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    teacher = torch.zeros(1, 2, dtype=torch.float64)
    common = {"targets": torch.tensor([0]), "normalizer": 1, "coef": 1.0}
    reached = entropy(teacher.log_softmax(-1)).item()
    mask = torch.tensor([True])
    at = entropy_opd_loss(student, teacher, mask, tau=reached, **common)
    above = entropy_opd_loss(student, teacher, mask, tau=math.nextafter(reached, 1), **common)
    forward = generalized_jsd(student, teacher, mask, jsd_beta=0, normalizer=1)
    assert (at - above).item() == pytest.approx(forward.item(), rel=1e-7)


def test_without_old_logprobs_the_gradient_is_the_sampled_reverse_kl() -> None:
    student, teacher, mask = batch()
    targets = sampling(student)["targets"]
    loss = entropy_opd_loss(student, teacher, mask, targets=targets, coef=0, normalizer=1)
    loss.backward()
    s_log, p_log = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    advantage = (p_log - s_log).gather(-1, targets[..., None])
    onehot = torch.nn.functional.one_hot(targets, 6)
    expected = torch.where(mask[..., None], -advantage * (onehot - s_log.exp()), 0.0)
    torch.testing.assert_close(student.grad, expected, rtol=1e-9, atol=1e-12)


def test_the_temperature_divides_both_sides() -> None:
    student, teacher, mask = batch()
    targets = sampling(student)["targets"]
    warm = entropy_opd_loss(student, teacher, mask, targets=targets, temperature=2, normalizer=3)
    scaled = entropy_opd_loss(student / 2, teacher / 2, mask, targets=targets, normalizer=3)
    torch.testing.assert_close(warm, scaled)
    warm = entropy_gated_kl(student, teacher, mask, temperature=2, normalizer=3)
    scaled = entropy_gated_kl(student / 2, teacher / 2, mask, normalizer=3)
    torch.testing.assert_close(warm, scaled)


@pytest.mark.parametrize("old", [-100.0, 0.0])
def test_ratios_far_outside_the_clip_stay_finite(old: float) -> None:
    student, teacher, mask = batch(scale=50)
    extra = sampling(student) | {"old_logprobs": torch.full((3, 4), old, dtype=torch.float64)}
    for dtype in (torch.float32, torch.float64):
        single = student.detach().to(dtype).requires_grad_()
        extra["old_logprobs"] = extra["old_logprobs"].to(dtype)
        loss = entropy_opd_loss(single, teacher.to(dtype), mask, normalizer=3, **extra)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(single.grad).all()


@pytest.mark.parametrize(("dtype", "rtol", "atol"), FLOATS)
@pytest.mark.parametrize("h_max", [None, 0.9])
def test_the_soft_gate_agrees_with_its_definition(
    h_max: float | None, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    student, teacher, mask = batch(seed=8)
    total = torch.zeros((), dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        s, p = probabilities(student[b, t]), probabilities(teacher[b, t])
        h = -sum(x * math.log(x) for x in p.tolist())
        w = min(h / (h_max or math.log(6)), 1.0)
        total = total + w * (p * (p / s).log()).sum() + (1 - w) * (s * (s / p).log()).sum()
    (wanted,) = torch.autograd.grad(total / 5, student)
    single = student.detach().to(dtype).requires_grad_()
    found = entropy_gated_kl(single, teacher.to(dtype), mask, h_max=h_max, normalizer=5)
    found.backward()
    torch.testing.assert_close(found.double(), total / 5, rtol=rtol, atol=atol)
    torch.testing.assert_close(single.grad.double(), wanted, rtol=rtol, atol=atol)


def test_a_padded_vocabulary_contributes_nothing() -> None:
    student, teacher, mask = (x.detach() for x in batch())
    padding = torch.full((3, 4, 2), -math.inf, dtype=torch.float64)
    wide = torch.cat([student, padding], -1).requires_grad_()
    other = torch.cat([teacher, padding], -1)
    extra = sampling(student)
    found = entropy_opd_loss(wide, other, mask, top_k=8, tau=0, normalizer=3, **extra)
    plain = entropy_opd_loss(student, teacher, mask, top_k=6, tau=0, normalizer=3, **extra)
    torch.testing.assert_close(found, plain)
    soft = entropy_gated_kl(wide, other, mask, h_max=1.0, normalizer=3)
    torch.testing.assert_close(
        soft, entropy_gated_kl(student, teacher, mask, h_max=1.0, normalizer=3)
    )
    (found + soft).backward()
    assert torch.isfinite(wide.grad).all()


def test_a_vocabulary_of_one_entry_has_nothing_to_learn() -> None:
    one = torch.zeros(2, 3, 1)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert entropy_gated_kl(one, one, mask, normalizer=6).item() == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tau": -1.0}, "tau is -1.0 but an entropy is >= 0"),
        ({"coef": math.inf}, "coef is inf but must be finite"),
        ({"clip_low": 2.0}, r"clip_low is 2.0 but must be in \[0, 1\]"),
        ({"clip_high": -0.1}, "clip_high is -0.1 but must be >= 0"),
        ({"top_k": 0}, "top_k is 0 but must be >= 1"),
        ({"temperature": -1.0}, "temperature is -1.0 but must be > 0"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    changed: dict[str, Any], message: str
) -> None:
    student, teacher, mask = batch()
    arguments = {"targets": sampling(student)["targets"], "normalizer": 1, **changed}
    with pytest.raises(ValueError, match=message):
        entropy_opd_loss(student, teacher, mask, **arguments)


def test_an_impossible_entropy_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="h_max is 0 but must be > 0 nats"):
        entropy_gated_kl(*batch(), h_max=0, normalizer=1)


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
    with pytest.raises(ValueError, match=rf"fraction is {fraction} but must be in \(0, 1\]"):
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
