"""Samples one token per row from the distribution whose log-prob is reported. Stateless."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperatures: Sequence[float], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return token ids and log-probs for float32 logits `[rows, V]`; temperature 0 is greedy.

    A draw in [0, 1) picks the token at which the cumulative distribution passes it, so that a token
    depends on its own row only. Greedy log-probs are those of temperature 1.
    """
    if any(temperature not in (0, 1) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits = logits / torch.tensor(divisors, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    sought = torch.tensor(draws, device=logits.device)[:, None] * total
    # Rounding may reach the total itself, which no token passes.
    below = torch.nextafter(total, torch.zeros_like(total))
    picked = torch.searchsorted(cumulative, torch.minimum(sought, below), right=True)
    if 0 in temperatures:
        greedy = torch.tensor([temperature == 0 for temperature in temperatures])
        picked = torch.where(
            greedy.to(logits.device)[:, None], logits.argmax(-1, keepdim=True), picked
        )
    chosen = logprobs.gather(-1, picked)
    return picked[:, 0].tolist(), chosen[:, 0].tolist()
