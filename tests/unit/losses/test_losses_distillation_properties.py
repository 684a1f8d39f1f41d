"""What holds for every distillation loss, whatever it computes: sums, masks, detached teachers."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.distillation import (
    entropy_gated_kl,
    entropy_opd_from_logprobs,
    entropy_opd_loss,
    generalized_jsd,
    sampled_reverse_kl,
    sdpo_loss,
    taid_loss,
    topk_distillation,
)
from composer_mesh.losses.reductions import reduce_terms

Loss = Callable[..., Tensor]
Tensors = dict[str, Tensor]


def logits_of(rng: torch.Generator, rows: int, scale: float) -> Tensors:
    """Logits over 6 entries, sampled ids and what the student gave them when it sampled."""

    def scores() -> Tensor:
        return (scale * torch.randn(rows, 4, 6, generator=rng, dtype=torch.float64)).clamp(-50, 50)

    student, teacher = scores(), scores()
    targets = torch.randint(6, (rows, 4), generator=rng)
    old = student.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    old = old + 0.2 * torch.randn(rows, 4, generator=rng, dtype=torch.float64)
    weights = torch.rand(rows, 4, generator=rng, dtype=torch.float64)
    return {
        "student": student,
        "teacher": teacher,
        "targets": targets,
        "old": old,
        "weights": weights,
    }


def logits_batch(seed: int = 0, rows: int = 3, scale: float = 3.0) -> tuple[Tensors, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    data = logits_of(rng, rows, scale)
    return data, torch.rand(rows, 4, generator=rng) < 0.6


def sampled(data: Tensors, mask: Tensor, normalizer: float | None = None, **how: Any) -> Tensor:
    # Here and below, scores of the first entries stand for log-probs that somebody gathered.
    logprobs, teacher = data["student"][..., 0], data["teacher"][..., 0]
    return sampled_reverse_kl(
        logprobs,
        teacher,
        mask,
        normalizer=normalizer,
        old_logprobs=data["old"],
        weights=data["weights"],
        **how,
    )


def gathered(data: Tensors, mask: Tensor, normalizer: float | None = None, **how: Any) -> Tensor:
    return topk_distillation(
        data["student"][..., :3].clamp(max=-1.5),
        data["teacher"][..., :3].clamp(max=-1.5),
        mask,
        jsd_beta=0.5,
        weights=data["weights"],
        normalizer=normalizer,
        **how,
    )


def opd_from_logprobs(
    data: Tensors, mask: Tensor, normalizer: float | None = None, **how: Any
) -> Tensor:
    return entropy_opd_from_logprobs(
        data["student"][..., 0],
        data["old"],
        data["teacher"][..., 0],
        mask,
        teacher_entropy=data["teacher"][..., 1].abs(),
        student_topk_logprobs=data["student"][..., :3],
        teacher_topk_logprobs=data["teacher"][..., :3].clamp(max=-1.5),
        normalizer=normalizer,
        **how,
    )


def on_logits(function: Loss, *sampling: str, **settings_: Any) -> Loss:
    names = {"targets": "targets", "old_logprobs": "old", "weights": "weights"}

    def loss(data: Tensors, mask: Tensor, normalizer: float | None = None, **how: Any) -> Tensor:
        extra = {name: data[names[name]] for name in sampling} | settings_ | how
        return function(data["student"], data["teacher"], mask, **extra, normalizer=normalizer)

    return loss


SAMPLING = ("targets", "old_logprobs")
LOSSES: dict[str, Loss] = {
    "jsd": on_logits(generalized_jsd, jsd_beta=0.5, element_clip=0.05, top_k=4),
    "forward": on_logits(generalized_jsd, jsd_beta=0, top_k=4),
    "reverse": on_logits(generalized_jsd, jsd_beta=1),
    "sdpo": on_logits(sdpo_loss, *SAMPLING, "weights", top_k=3),
    "sdpo without a tail": on_logits(sdpo_loss, jsd_beta=1, top_k=3, tail=False),
    "sdpo by the teacher": on_logits(sdpo_loss, jsd_beta=0, top_k=3, choice="teacher"),
    "sdpo of everything": on_logits(sdpo_loss, top_k=None),
    "top-k": gathered,
    "taid": on_logits(taid_loss, t=0.4),
    "opd": on_logits(entropy_opd_loss, *SAMPLING, top_k=3),
    "opd over the top k": on_logits(
        entropy_opd_loss, "targets", top_k=3, tau=0, student_full_vocab=False
    ),
    "opd from log-probs": opd_from_logprobs,
    "soft gate": on_logits(entropy_gated_kl),
    "sampled": sampled,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def with_gradient(data: Tensors, name: str = "student") -> Tensors:
    return data | {name: data[name].detach().clone().requires_grad_()}


@every_loss
def test_unreduced_terms_add_up_to_the_loss_and_are_zero_under_no_mask(loss: Loss) -> None:
    data, mask = logits_batch()
    data = with_gradient(data)
    terms = loss(data, mask, reduction="none")
    whole = loss(data, mask, 7.0)
    assert terms.shape == mask.shape
    assert terms[~mask].tolist() == [0] * int((~mask).sum())
    torch.testing.assert_close(terms.sum() / 7, whole, rtol=1e-7, atol=1e-12)
    gradients = (torch.autograd.grad(x, data["student"])[0] for x in (terms.sum() / 7, whole))
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


@every_loss
def test_an_unreduced_term_depends_on_its_own_token_alone(loss: Loss) -> None:
    data, mask = logits_batch()
    mask[0, 1] = True
    data = with_gradient(data)
    term = loss(data, mask, reduction="none")[0, 1]
    gradient = torch.autograd.grad(term, data["student"])[0]
    gradient[0, 1] = 0
    assert not gradient.any()


@every_loss
def test_a_sum_without_a_normalizer_is_refused(loss: Loss) -> None:
    with pytest.raises(ValueError, match="normalizer is None but reduction 'sum' divides by it"):
        loss(*logits_batch())


def test_an_unknown_reduction_is_refused() -> None:
    unchecked = inspect.unwrap(reduce_terms)  # past the type checks of the tests
    with pytest.raises(ValueError, match="reduction is 'mean': use 'sum' or 'none'"):
        unchecked(torch.ones(2), 1, "mean")


@given(name=st.sampled_from(list(LOSSES)), split=st.integers(0, 5), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_microbatch_losses_add_up_to_the_batch_loss(name: str, split: int, seed: int) -> None:
    data, mask = logits_batch(seed, rows=5)

    def part(rows: slice) -> Tensor:
        return LOSSES[name]({k: v[rows] for k, v in data.items()}, mask[rows], 7)

    total = part(slice(split)) + part(slice(split, None))
    torch.testing.assert_close(total, part(slice(None)), rtol=1e-12, atol=1e-14)


@every_loss
def test_the_order_of_sequences_does_not_matter(loss: Loss) -> None:
    data, mask = logits_batch()
    order = torch.tensor([2, 0, 1])
    shuffled = loss({k: v[order] for k, v in data.items()}, mask[order], 5)
    torch.testing.assert_close(shuffled, loss(data, mask, 5), rtol=1e-12, atol=1e-14)


@every_loss
def test_leading_axes_may_be_any_number_also_none(loss: Loss) -> None:
    data, mask = logits_batch()
    rows = [loss({k: v[i] for k, v in data.items()}, mask[i], 5) for i in range(3)]
    deep = loss({k: v[None] for k, v in data.items()}, mask[None], 5)
    torch.testing.assert_close(sum(rows), loss(data, mask, 5), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(deep, loss(data, mask, 5), rtol=1e-12, atol=1e-14)


@every_loss
def test_gradients_reach_the_student_alone(loss: Loss) -> None:
    data, mask = logits_batch()
    floating = {k: v.clone().requires_grad_() for k, v in data.items() if v.is_floating_point()}
    loss(data | floating, mask, 5).backward()
    assert floating["student"].grad.abs().sum() > 0
    assert all(v.grad is None for k, v in floating.items() if k != "student")


@every_loss
def test_an_empty_mask_gives_zero_and_a_zero_gradient(loss: Loss) -> None:
    data, mask = logits_batch()
    data = with_gradient(data)
    found = loss(data, torch.zeros_like(mask), 0)
    found.backward()
    assert found.item() == 0
    assert torch.equal(data["student"].grad, torch.zeros_like(data["student"]))


@every_loss
def test_a_batch_of_no_sequences_gives_zero(loss: Loss) -> None:
    data, mask = logits_batch(rows=0)
    data = with_gradient(data)
    found = loss(data, mask, 3)
    found.backward()
    assert found.item() == 0


@every_loss
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_stands_under_no_mask_changes_nothing(loss: Loss, junk: float) -> None:
    data, mask = logits_batch()
    clean = loss(data, mask, 3)
    dirty = {}
    for name, value in data.items():
        shown = mask.reshape(mask.shape + (1,) * (value.dim() - 2))
        dirty[name] = torch.where(shown, value, junk) if value.is_floating_point() else value
    dirty = with_gradient(dirty)
    found = loss(dirty, mask, 3)
    found.backward()
    assert torch.equal(found, clean)
    assert torch.isfinite(dirty["student"].grad).all()
    assert not dirty["student"].grad[~mask].any()


@pytest.mark.parametrize("name", ["forward", "reverse", "sdpo of everything", "top-k", "soft gate"])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_gradients_are_those_of_finite_differences(name: str, scale: float) -> None:
    """For the losses that take nothing from the student as a constant."""
    data, mask = logits_batch(seed=3, scale=scale)
    assert torch.autograd.gradcheck(
        lambda student: LOSSES[name](data | {"student": student}, mask, 5),
        data["student"].clone().requires_grad_(),
    )


@every_loss
def test_float32_agrees_with_float64_also_under_extreme_logits(loss: Loss) -> None:
    for scale in (3.0, 50.0):
        data, mask = logits_batch(seed=1, scale=scale)
        single = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
        double = {k: v.double() if v.is_floating_point() else v for k, v in single.items()}
        results = []
        for inputs in (single, double):
            inputs = with_gradient(inputs)
            value = loss(inputs, mask, 8)
            value.backward()
            results.append((value.detach().double(), inputs["student"].grad.double()))
        torch.testing.assert_close(results[0], results[1], rtol=5e-5, atol=2e-6)


@every_loss
def test_half_precision_inputs_are_computed_in_float32(loss: Loss) -> None:
    data, mask = logits_batch()
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in data.items()}
    found = loss(half, mask, 3)
    full = {k: v.double() if v.is_floating_point() else v for k, v in half.items()}
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss(full, mask, 3).item(), rel=5e-5)
