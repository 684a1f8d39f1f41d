"""Log-probs of a sequence that is given, of its own tokens and of others at their positions.

Axes: T tokens, V vocabulary, K ids at one position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_mesh.actors.models.language_model import decoder_states, logit_softcap
from composer_mesh.losses.blocks import default_block, softcapped
from composer_mesh.plugins.tinker.models.messages import ScoreRequest, Scores


@torch.inference_mode()
def scored(model: Any, ids: list[int], request: ScoreRequest) -> Scores:
    """Return the log-probs of tokens 1 to T - 1; empty arrays for a sequence of one token.

    Raises ValueError where they are not finite. Scores of a block of positions are freed before
    those of the next are computed.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor(ids, device=device)
    states = decoder_states(model, input_ids=tokens[None])[0, :-1]
    vocabulary = int(model.config.get_text_config().vocab_size)
    block = max(1, default_block(states) // vocabulary)
    targets = None if request.targets is None else torch.from_numpy(request.targets).to(device)
    parts = [
        _block(
            model,
            states[n : n + block],
            tokens[n + 1 : n + 1 + block],
            request.top_k,
            None if targets is None else targets[n : n + block],
        )
        for n in range(0, max(1, len(states)), block)
    ]
    own, top_ids, top, wanted = (
        None if column[0] is None else torch.cat(column).cpu().numpy()
        for column in zip(*parts, strict=True)
    )
    assert own is not None
    if np.isnan(own).any():
        raise ValueError("logits are not finite: score with weights that have not diverged")
    ints = None if top_ids is None else top_ids.astype(np.int32)
    return Scores(own, ints, top, wanted)


def _block(
    model: Any, states: Tensor, own: Tensor, top_k: int, targets: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    head = model.get_output_embeddings()
    logprobs = softcapped(head(states[None])[0].float(), logit_softcap(model.config)).log_softmax(
        -1
    )
    chosen = logprobs.gather(-1, own[:, None])[:, 0]
    top, top_ids = logprobs.topk(min(top_k, logprobs.shape[-1])) if top_k else (None, None)
    if targets is None:
        return chosen, top_ids, top, None
    found = logprobs.gather(-1, targets.clamp(min=0))
    return chosen, top_ids, top, found.masked_fill(targets < 0, 0.0)
