"""Log-probs of given tokens from a model's hidden states, without all its scores at once.

Axes: N rows, H hidden size, V vocabulary, K targets of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer_mesh.losses.blocks import default_block, softcapped

Head = Callable[[Tensor], Tensor]


def target_logprobs(
    hidden: Tensor, head: Head, targets: Tensor, vocabulary: int, softcap: float | None = None
) -> Tensor:
    """Return the log-probs [M, N, K] of targets [M, N, K] for hidden states [M, N, H].

    The rows of M models are cut together, so that the head sees all models. Scores of a block are
    computed again in the backward where all of them would not fit.
    """

    def scored(states: Tensor, chosen: Tensor) -> Tensor:
        scores = softcapped(head(states).float(), softcap)
        return scores.gather(-1, chosen) - scores.logsumexp(-1, keepdim=True)

    models, rows, _ = hidden.shape
    most = max(1, default_block(hidden) // (vocabulary * models))
    if rows <= most:
        return scored(hidden, targets)
    blocks = [
        checkpoint(scored, states, chosen, use_reentrant=False)
        for states, chosen in zip(hidden.split(most, 1), targets.split(most, 1), strict=True)
    ]
    return torch.cat(blocks, 1)
