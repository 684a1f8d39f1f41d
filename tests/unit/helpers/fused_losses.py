"""Rows, whole losses and single steps that tests of the fused losses compare."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_mesh.losses.distillation import generalized_jsd
from composer_mesh.losses.fused import (
    linear_jsd,
    linear_logprobs,
)

SIZES = [(1, 1, 2), (7, 3, 5), (13, 6, 31), (40, 4, 9)]
BLOCKS = [1, 40, 10_000]
BETAS = [0, 0.3, 0.5, 1]
NORMALIZER = 3


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sum(shape) for shape in shapes))
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [value.to(dtype).requires_grad_() for value in values]


def rows_of(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def whole_jsd(student: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    mask = rows_of(len(student)).to(student.device)
    return generalized_jsd(
        student, teacher, mask, jsd_beta=beta, temperature=temperature, normalizer=NORMALIZER
    )


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 5e-5, "atol": 1e-5}


def logprobs_step(h: Tensor, weight: Tensor, block: int) -> Tensor:
    return linear_logprobs(h, weight, torch.arange(len(h)), block=block).sum()


def jsd_step(h: Tensor, weight: Tensor, block: int) -> Tensor:
    return linear_jsd(h, weight, h.detach(), weight, jsd_beta=0.5, normalizer=1, block=block)
