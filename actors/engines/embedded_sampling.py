"""Samples one token per row from the distribution whose log-prob is reported. Stateless."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from composer_mesh.rollouts.generation import WHOLE, Truncation


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    draws: Sequence[float],
    truncations: Sequence[Truncation] = (),
) -> tuple[list[int], list[float]]:
    """Return token ids and log-probs for float32 logits `[rows, V]`; temperature 0 is greedy.

    A draw in [0, 1) picks the token at which the cumulative distribution passes it, so that a token
    depends on its own row only. Greedy log-probs are those of temperature 1, of all tokens. A row
    whose logits are not finite has the log-prob NaN, and an id without a meaning.
    """
    if any(temperature not in (0, 1) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits = logits / torch.tensor(divisors, device=logits.device)[:, None]
    if any(truncation != WHOLE for truncation in truncations):
        rows = zip(logits, temperatures, truncations, strict=True)
        logits = torch.stack([truncated(row, cut) if heat else row for row, heat, cut in rows])
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    sought = torch.tensor(draws, device=logits.device)[:, None] * total
    # Rounding may reach the total itself, which no token passes.
    below = torch.nextafter(total, torch.zeros_like(total))
    picked = torch.searchsorted(cumulative, torch.minimum(sought, below), right=True)
    picked = picked.clamp(max=logits.shape[-1] - 1)  # NaN is found nowhere
    if 0 in temperatures:
        greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        picked = torch.where(
            greedy.to(logits.device)[:, None], logits.argmax(-1, keepdim=True), picked
        )
    chosen = logprobs.gather(-1, picked)
    return picked[:, 0].tolist(), chosen[:, 0].tolist()


def truncated(logits: Tensor, truncation: Truncation) -> Tensor:
    """Return logits `[V]` in which tokens that may not be sampled are -inf, as vLLM's are.

    Tokens that are as probable as the last of the `top_k` stay too.
    """
    if truncation.min_p:
        least = logits.max() + math.log(truncation.min_p)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if 0 < truncation.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(truncation.top_k).values[-1], -torch.inf)
    if truncation.top_p < 1:
        ascending, places = logits.sort()
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - truncation.top_p
        outside[-1] = False
        logits = logits.masked_fill(outside[places.argsort()], -torch.inf)
    return logits
