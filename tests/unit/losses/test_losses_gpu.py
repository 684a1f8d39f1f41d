"""Losses on an accelerator: the published code's results, and fused losses as whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_losses import NORMALIZER, leaves, tolerance, whole_jsd
from torch import Tensor
from upstream_cases import (
    POLICY,
    TOLERANCES,
    check_advantages,
    check_distillation,
    check_kl,
    check_policy,
    check_preference,
    check_weights,
    distillation_cases,
    stored,
)

from composer_mesh.losses.fused import linear_jsd, linear_logprobs
from composer_mesh.losses.logprobs import token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
CUDA = torch.device("cuda")


def has_one_top_k(case: dict[str, Any]) -> bool:
    """Whether equal logits do not compete for a teacher's top-k, of which devices keep others."""
    k, logits = case["arguments"].get("top_k"), case["arguments"].get("teacher_logits")
    if not k or logits is None:
        return True
    ordered = torch.tensor(logits).sort(descending=True).values
    return bool((ordered[..., k - 1 : k] != ordered[..., k:]).all())


FAMILIES: dict[str, tuple[Callable[..., None], list[Any]]] = {
    "policy": (check_policy, POLICY["cases"]),
    "sampling weights": (check_weights, POLICY["weights"]),
    "KL": (check_kl, POLICY["kl"]),
    "advantages": (check_advantages, stored("advantages")["cases"]),
    "preference": (check_preference, stored("preference")["cases"]),
    "distillation": (
        check_distillation,
        [(group, case) for group, case in distillation_cases() if has_one_top_k(case)],
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_the_published_code(family: str, dtype: torch.dtype) -> None:
    check, cases = FAMILIES[family]
    failed = []
    for number, case in enumerate(cases):
        try:
            check(*(case if isinstance(case, tuple) else (case,)), dtype, CUDA)
        except Exception as error:  # noqa: BLE001  all cases that fail are named together
            failed.append(f"case {number}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_fused_losses_are_those_of_whole_logits(dtype: torch.dtype) -> None:
    shapes = (13, 6), (31, 6), (13, 6)
    made = [one.detach().to(CUDA).requires_grad_() for one in leaves(*shapes, dtype=dtype)]
    hidden, weight, teacher = made
    targets = torch.arange(13, device=CUDA)

    def gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    for block in (1, 40, 10_000):
        fused = gradients(linear_logprobs(hidden, weight, targets, block=block).sum())
        whole = gradients(token_logprobs(hidden @ weight.T, targets).sum())
        torch.testing.assert_close(fused, whole, **tolerance(dtype))
        found = linear_jsd(
            hidden,
            weight,
            teacher.detach(),
            weight.detach(),
            jsd_beta=0.3,
            normalizer=NORMALIZER,
            block=block,
        )
        expected = whole_jsd(hidden @ weight.T, (teacher @ weight.T).detach(), 0.3)
        torch.testing.assert_close(gradients(found), gradients(expected), **tolerance(dtype))
