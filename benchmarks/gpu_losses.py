"""The part `losses` of `gpu_day.py`: our fused losses compared with Liger-Kernel's.

Both get the same tensors, and their values and gradients are compared. Liger takes gradients in the
forward and sums those of the head in the dtype of its weight, ours in float32. It has no
distillation of a teacher's top k, and its log-probs need Triton, so a CPU has no twin of them.
FLOPs are those of the mathematics: three products for each loss on one head's scores, four for the
divergence of two. Memory is the peak beyond the inputs, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from gpu_limits import GIB, compute_dtype, peak_bytes, reset_peak, seconds
from gpu_parts import Bench, Row
from gpu_profile import explained
from torch import Tensor

from composer_mesh.losses.fused import linear_jsd, linear_logprobs, linear_scores
from composer_mesh.losses.grpo import grpo_loss
from composer_mesh.losses.jsd import topk_distillation
from composer_mesh.losses.preference import dpo_loss

VOCABULARIES = (151_936, 49_152, 262_144)
DRY_VOCABULARIES = (512, 384)
SEQUENCES, TOP_K, CLIP, DPO_BETA = 8, 64, 0.2, 0.1
MATRIX_BAR = 0.45
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference of a value, or norm of that of gradients, as a part of the peer's."""

Loss = Callable[["Inputs"], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Tensors of all losses: B sequences of T tokens, of which pairs are the two halves of B."""

    hidden: Tensor
    weight: Tensor
    teacher: Tensor
    teacher_weight: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def random(cls, bench: Bench, vocabulary: int) -> Inputs:
        size, device, dtype = bench.size, bench.device, compute_dtype(bench.device)
        rng = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device=device).to(dtype)

        def draw_ids(*shape: int) -> Tensor:
            return torch.randint(vocabulary, shape, generator=rng, device=device)

        hidden, weight = draw(size.rows, size.hidden), 0.02 * draw(vocabulary, size.hidden)
        targets = draw_ids(SEQUENCES, size.rows // SEQUENCES)
        old = linear_logprobs(hidden, weight, targets.flatten()).view_as(targets)
        return cls(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            draw(size.rows, size.hidden),
            0.02 * draw(vocabulary, size.hidden),
            targets,
            old + 0.3 * draw(*targets.shape).float(),
            torch.randn(SEQUENCES, generator=rng, device=device),
            draw_ids(size.rows, TOP_K),
            draw(size.rows, TOP_K).float().log_softmax(-1) - 0.1,
        )

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight


def our_logprobs(one: Inputs) -> Tensor:
    return -linear_logprobs(one.hidden, one.weight, one.targets.flatten()).mean()


def our_policy(one: Inputs) -> Tensor:
    logprobs = linear_logprobs(one.hidden, one.weight, one.targets.flatten())
    mask = torch.ones_like(one.targets, dtype=torch.bool)
    how: dict[str, Any] = {"clip_low": CLIP, "clip_high": CLIP, "normalizer": one.targets.numel()}
    return grpo_loss(logprobs.view_as(one.targets), one.old, one.advantages, mask, **how).loss


def our_jsd(one: Inputs) -> Tensor:
    how: dict[str, Any] = {"jsd_beta": 0.5, "normalizer": len(one.hidden)}
    return linear_jsd(one.hidden, one.weight, one.teacher, one.teacher_weight, **how)


def our_dpo(one: Inputs) -> Tensor:
    logprobs = linear_logprobs(one.hidden, one.weight, one.targets.flatten())
    chosen, rejected = logprobs.view_as(one.targets).sum(-1).chunk(2)
    none = torch.zeros_like(chosen)
    return dpo_loss(chosen, rejected, none, none, beta=DPO_BETA, normalizer=SEQUENCES // 2).loss


def our_top_k(one: Inputs) -> Tensor:
    def loss(scores: Tensor, rows: slice) -> Tensor:
        student = scores.log_softmax(-1).gather(-1, one.top_ids[rows])
        mask = torch.ones_like(student[:, 0], dtype=torch.bool)
        how: dict[str, Any] = {"jsd_beta": 0.5, "normalizer": len(one.hidden)}
        return topk_distillation(student, one.top_logprobs[rows], mask, **how)

    return linear_scores(loss, one.hidden, one.weight)


def their_logprobs(one: Inputs) -> Tensor:
    liger: Any = import_module("liger_kernel.transformers.functional")
    targets = one.targets.flatten()
    loss: Tensor = liger.liger_fused_linear_cross_entropy(one.hidden, one.weight, targets)
    return loss


def their_policy(one: Inputs) -> Tensor:
    liger: Any = import_module("liger_kernel.chunked_loss")
    loss = liger.LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=one.hidden.is_cuda,
        use_ref_model=False,
        epsilon_low=CLIP,
        epsilon_high=CLIP,
    )
    found: Tensor = loss(
        one.hidden.view(*one.targets.shape, -1),
        one.weight,
        one.targets,
        torch.ones_like(one.targets),
        one.advantages,
        old_per_token_logps=one.old,
    )[0]
    return found


def their_jsd(one: Inputs) -> Tensor:
    liger: Any = import_module("liger_kernel.chunked_loss")
    how: dict[str, Any] = {
        "weight_hard_loss": 0.0,
        "weight_soft_loss": 1.0,
        "compiled": one.hidden.is_cuda,
    }
    loss = liger.LigerFusedLinearJSDLoss(**how)
    labels = one.targets.flatten()
    found: Tensor = loss(one.hidden, one.weight, one.teacher, one.teacher_weight, labels)
    return found


def their_dpo(one: Inputs) -> Tensor:
    liger: Any = import_module("liger_kernel.chunked_loss")
    how: dict[str, Any] = {"beta": DPO_BETA, "use_ref_model": False, "compiled": one.hidden.is_cuda}
    loss = liger.LigerFusedLinearDPOLoss(**how)
    states = one.hidden.view(*one.targets.shape, -1)
    found: Tensor = loss(one.weight, states, one.targets)[0]
    return found


CASES: dict[str, tuple[Loss, Loss | None, int]] = {
    "log-probs": (our_logprobs, their_logprobs, 3),
    "policy loss": (our_policy, their_policy, 3),
    "JSD": (our_jsd, their_jsd, 4),
    "DPO pairs": (our_dpo, their_dpo, 3),
    "top-k distillation": (our_top_k, None, 3),
}
"""Our loss, Liger's where it has one, and matrix products of forward and backward."""
TRITON_ONLY = ("log-probs",)


def losses(bench: Bench) -> Iterator[Row]:
    """Measure the losses of several vocabularies, forward and backward, ours and Liger's."""
    vocabularies = VOCABULARIES if bench.device.type == "cuda" else DRY_VOCABULARIES
    for vocabulary in vocabularies:
        inputs = Inputs.random(bench, vocabulary)
        for name, (ours, theirs, products) in CASES.items():
            if find_spec("liger_kernel") is None or not has_twin(name, bench.device):
                theirs = None
            named = f"{name}, vocabulary {vocabulary:,}"
            yield from measured(bench, named, ours, theirs, products, inputs)


def has_twin(name: str, device: torch.device) -> bool:
    """Whether Liger has a loss that runs on a device."""
    return CASES[name][1] is not None and (device.type == "cuda" or name not in TRITON_ONLY)


def difference(ours: Loss, theirs: Loss, inputs: Inputs) -> float:
    """Return how far two losses differ, as a part of the peer's: value, or norm of a gradient."""
    own, other = ours(inputs), theirs(inputs)
    found = [float((own - other).detach().abs() / other.detach().abs().clamp_min(1e-6))]
    for leaf in inputs.leaves:
        (mine,) = torch.autograd.grad(own, leaf, retain_graph=True)
        (peer,) = torch.autograd.grad(other, leaf, retain_graph=True)
        found.append(float((mine - peer).norm() / peer.norm()))
    return max(found)


def measured(
    bench: Bench, name: str, ours: Loss, theirs: Loss | None, products: int, inputs: Inputs
) -> Iterator[Row]:
    """Yield the share of the matrix limit, then time and memory as ratios to the peer's."""
    run = partial(whole, ours, inputs)
    own, held = cost(bench, run)
    vocabulary, hidden = inputs.weight.shape
    tflop = products * 2 * len(inputs.hidden) * hidden * vocabulary / 1e12
    limit = bench.limits.matmul_tflops
    yield explained(bench, Row(name, tflop / own, "TFLOP/s", limit, MATRIX_BAR), run)
    if theirs is None:
        return
    error = difference(ours, theirs, inputs)
    bar = TOLERANCE[inputs.hidden.dtype]
    yield Row(f"{name}: difference to Liger's", error, "", 1.0, bar, at_most=True)
    other, taken = cost(bench, partial(whole, theirs, inputs))
    yield Row(f"{name}: time over Liger's", own, "s", other, 1.0, at_most=True)
    if taken:
        yield Row(f"{name}: memory over Liger's", held, "GiB", taken, 1.0, at_most=True)


def whole(loss: Loss, inputs: Inputs) -> None:
    """Compute a loss and its gradients."""
    torch.autograd.grad(loss(inputs), inputs.leaves)


def cost(bench: Bench, call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, and GiB at the most beyond those held; 0 on a CPU."""
    call()  # compiles
    before = reset_peak(bench.device)
    took = seconds(call, bench.device, 2)
    peak = peak_bytes(bench.device)
    return took, 0.0 if peak is None else (peak - before) / GIB


PARTS = {"losses": losses}
