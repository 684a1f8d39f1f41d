"""A causal language model taken apart: its hidden states, and the linear head that scores them.

What trains asks for hidden states, keeps the rows that count, and lets `losses.fused` put the head
on them, so that scores of a whole microbatch never exist. Nothing here computes a loss.

Axes: B sequences, T their padded length, H hidden size, V vocabulary, N rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer_mesh.losses.fused import linear_logprobs

PROBE_IDS = 3
PROBE_SCALE = 1e3
PROBE_TOLERANCE = 1e-3


class UnsupportedHead(ValueError):
    """A model whose scores are no linear function of its last hidden states."""

    def __init__(self, model: str, difference: float) -> None:
        super().__init__(model, difference)

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: its logits differ from those of its hidden states and head by up to "
            f"{self.args[1]:.3g}, so it caps or scales them, which the fused losses do not know: "
            "use a model with a plain linear head"
        )


class LanguageModel:
    """The two halves of a Hugging Face causal LM."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._head = model.get_output_embeddings()

    @property
    def weight(self) -> Tensor:
        """The head's weight [V, H]."""
        weight: Tensor = self._head.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The head's bias [V], which few models have."""
        return getattr(self._head, "bias", None)

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `UnsupportedHead` unless head and hidden states give the model's own logits.

        For the comparison the head speaks a thousand times louder: a cap is nearly the identity
        on the small logits of an untrained model.
        """
        ids = torch.arange(PROBE_IDS)[None]
        louder = self._head.register_forward_hook(lambda *call: call[-1] * PROBE_SCALE)
        try:
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            apart = self._head(self.hidden(ids.tolist())).float()
        finally:
            louder.remove()
        difference = float((own - apart).abs().max())
        if not difference <= PROBE_TOLERANCE * max(1.0, float(own.abs().max())):
            raise UnsupportedHead(type(self.model).__name__, difference)

    def hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Last hidden states [B, T, H], normed, of sequences padded on the right."""
        ids = padded(sequences)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        decoder = self.model.base_model
        states: Tensor = decoder(
            input_ids=ids, attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        return states

    def logprobs(
        self, hidden: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Log-probs [B, T - 1] of each next id where the mask [B, T - 1] is True, 0 elsewhere.

        `hidden` [B, T, H] and `ids` [B, T] are of the same sequences.
        """
        found = linear_logprobs(
            hidden[:, :-1][mask],
            self.weight,
            ids[:, 1:][mask],
            bias=self.bias,
            temperature=temperature,
        )
        return found.new_zeros(mask.shape).masked_scatter(mask, found)


def padded(rows: Sequence[Sequence[Any]]) -> Tensor:
    """Rows of numbers [B, T], zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
