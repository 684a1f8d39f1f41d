"""What the policy thought of a step's samples before the step's first update.

Axes: B sequences of a microbatch, T their padded length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.losses.entropy import high_entropy_mask, linear_entropies
from composer_mesh.rollouts.batches import PolicySample


class StepStart:
    """Log-probs of a step's sampled tokens, and which of them have the highest entropies.

    `fraction` of the tokens of all ranks are chosen; with 1 no entropies are computed.
    """

    def __init__(self, temperature: float, fraction: float) -> None:
        self._temperature, self._fraction = temperature, fraction
        self._logprobs: dict[str, Tensor] = {}
        self._entropies: dict[str, tuple[Tensor, Tensor]] = {}
        self._chosen: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether log-probs are kept."""
        return bool(self._logprobs)

    def add(
        self,
        model: LanguageModel,
        samples: Sequence[PolicySample],
        hidden: HiddenStates,
        ids: Tensor,
        mask: Tensor,
    ) -> None:
        """Keep the log-probs, and the entropies if some are chosen by them, of some samples.

        `ids` are [B, T], and `mask` is [B, T - 1], True at sampled tokens.
        """
        found = model.logprobs(hidden, ids, mask, self._temperature).cpu()
        for sample, row in zip(samples, found, strict=True):
            self._logprobs[sample.trace_id] = row[: len(sample.ids) - 1]
        if self._fraction == 1:
            return
        rows = hidden.predicting(mask)
        own = linear_entropies(
            rows.states,
            model.weight,
            bias=model.bias,
            softcap=model.softcap,
            temperature=self._temperature,
        )
        entropies = rows.whole(own).cpu()
        masks = mask.cpu()
        counts = masks.sum(1).tolist()
        for sample, row, part in zip(samples, masks, entropies.split(counts), strict=True):
            self._entropies[sample.trace_id] = row[: len(sample.ids) - 1], part

    def choose(self, ranks: Ranks) -> None:
        """Choose the tokens with the highest entropies, once all samples are added. Collective."""
        if self._fraction == 1:
            return
        own = torch.cat([torch.empty(0), *(one for _, one in self._entropies.values())])
        everything = ranks.of_shares(own)
        entropies = torch.cat(everything)
        chosen = high_entropy_mask(entropies, torch.ones_like(entropies).bool(), self._fraction)
        first = sum(map(len, everything[: ranks.share]))
        for name, (mask, found) in self._entropies.items():
            part = chosen[first : first + len(found)]
            self._chosen[name] = torch.zeros(len(mask)).masked_scatter(mask, part.float())
            first += len(found)
        self._entropies = {}

    def logprobs(self, samples: Sequence[PolicySample], device: torch.device) -> Tensor:
        """Return the log-probs [B, T - 1] of some samples."""
        return _padded(self._logprobs, samples, device)

    def chosen(self, samples: Sequence[PolicySample], device: torch.device) -> Tensor | None:
        """Return 1 at the chosen tokens [B, T - 1] of some samples, else 0; None if all are."""
        return _padded(self._chosen, samples, device) if self._chosen else None


def _padded(
    rows: dict[str, Tensor], samples: Sequence[PolicySample], device: torch.device
) -> Tensor:
    return pad_sequence([rows[one.trace_id] for one in samples], batch_first=True).to(device)
