"""One forward, and the backward, of some models' rows, which the ranks of a trainer divide.

    check      every rank reads ids and inputs of all rows; one that cannot tells the others
    forward    each rank computes the log-probs of its rows; these are gathered, K numbers a token
    loss       every rank computes the losses of all rows from the same numbers, and backpropagates
               into its own rows alone: any loss of a client is right, also one of pairs of rows
    gradient   adapters of each rank, added in the order of ranks; the same bits on all of them

A rank whose share is padding computes zeros, so that all ranks make the same calls. Errors of
reading and of losses are agreed on, so that no rank waits for one that has given up. An error of a
forward or backward, between messages, cannot be: it is `RanksLost`, and all ranks are replaced.

Axes: M models of a batch, R rows of each, B = M * R, T padded tokens, K targets of a token, P
numbers of one model's adapters, N rows of one model in `target_logprobs`, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer_mesh.actors.models.language_model import decoder_call, logit_softcap
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import release
from composer_mesh.losses.blocks import default_block, softcapped
from composer_mesh.mesh.progress import made_progress
from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES
from composer_mesh.plugins.tinker.models.batches import (
    Padded,
    Shares,
    padded,
    padded_inputs,
    target_count,
)
from composer_mesh.plugins.tinker.models.messages import (
    BatchShape,
    Datum,
    ModelSpec,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.models.trained_weights import ModelWeights

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


TOTAL = "loss:sum"
"""SDKs add up the metrics of several requests whose names end so."""


def joined(parts: Sequence[TrainResult], shape: BatchShape) -> TrainResult:
    """Return the results of a call's microbatches as one."""
    logprobs = tuple(one for part in parts for one in part.logprobs)
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    metrics = {name: sum(part.metrics.get(name, 0.0) for part in parts) for name in names}
    return TrainResult(logprobs, metrics, shape)


@dataclass(frozen=True)
class CallRows:
    """Some rows of a call, and where they are in a batch."""

    call: TrainCall
    data: tuple[Datum, ...]
    shape: BatchShape

    @property
    def first(self) -> int:
        """The number of its first row in the batch."""
        return self.shape.place * self.shape.rows

    def targets(self, batch: Tensor) -> Tensor:
        """Return its rows [rows, T, K] of a batch [B, T, K]; [rows, T] of one target a token."""
        own = batch[self.first : self.first + len(self.data)]
        return own[..., 0] if own.shape[2] == 1 else own

    def loss(
        self, found: Tensor, inputs: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and those of its channels; padded rows and positions add nothing."""
        loss = CLIENT_LOSSES[self.call.loss]
        return loss.total(self.targets(found), inputs, self.call.options, mask)

    def cut(self, logprobs: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Return each row's log-probs in the shape of its targets."""
        return tuple(
            logprobs[row, : len(one.tokens), : target_count(one)]
            .reshape(one.inputs["target_tokens"].shape)
            .copy()
            for row, one in enumerate(self.data, start=self.first)
        )


@dataclass(frozen=True)
class Computed:
    """Of some rows of a call: their log-probs, losses by name, and the gradient [P] of their model.

    The gradient is None of a forward alone.
    """

    logprobs: tuple[NDArray[np.float32], ...]
    metrics: dict[str, float]
    gradient: Tensor | None


class Forwards:
    """Computes rows of models on one base; every rank makes the same calls."""

    def __init__(self, base: Any, weights: ModelWeights, ranks: Ranks) -> None:
        self.device = next(base.parameters()).device
        self.vocabulary = int(base.config.get_text_config().vocab_size)
        self._base, self._weights, self._ranks = base, weights, ranks
        self._softcap = logit_softcap(base.config)

    def run(
        self, owners: Sequence[CallRows], spec: ModelSpec, flats: Mapping[str, Tensor]
    ) -> list[Computed]:
        """Compute one batch of some models' rows; `flats` are their numbers [P], by name.

        Raises an error of the data on all ranks, and `RanksLost`.
        """
        try:
            return self._computed(owners, spec, flats)
        finally:
            with self._ranks.waiting_for_each_other():
                release(self._base)

    def _computed(
        self, owners: Sequence[CallRows], spec: ModelSpec, flats: Mapping[str, Tensor]
    ) -> list[Computed]:
        shape, backward = owners[0].shape, owners[0].call.kind == "forward_backward"
        rows, losses = self._ranks.agreed(lambda: self._read(owners, shape))
        shares, gradients = Shares.of(shape, self._ranks.size), None
        places: list[Tensor | None] = [None] * shape.models
        for one in owners:
            places[one.shape.place] = flats[one.call.model]
        with torch.set_grad_enabled(backward):
            with self._ranks.waiting_for_each_other():
                own, leaf = self._own_logprobs(rows, shares, spec, places)
                parts = self._ranks.gather_tensors(own.detach())
            parts[self._ranks.rank] = own
            found = shares.joined(parts)
            each = list(zip(owners, losses, strict=True))
            totals = self._ranks.agreed(lambda: [one.loss(found, *given) for one, given in each])
            if backward:
                with self._ranks.waiting_for_each_other():
                    gradients = self._gradients([total for total, _ in totals], own, leaf, shares)
        made_progress(f"a batch of {len(owners)} clients' rows")
        logprobs = found.detach().cpu().numpy()
        computed = []
        for one, (total, channels) in zip(owners, totals, strict=True):
            metrics = {f"loss/{name}:sum": float(loss) for name, loss in channels.items()}
            metrics[TOTAL] = float(total.detach())
            gradient = None if gradients is None else gradients[one.shape.place]
            computed.append(Computed(one.cut(logprobs), metrics, gradient))
        return computed

    def _read(
        self, owners: Sequence[CallRows], shape: BatchShape
    ) -> tuple[Padded, list[tuple[dict[str, Tensor], Tensor]]]:
        """Return the padded rows, and of each owner the inputs and the mask of its loss.

        Raises ValueError for ids that the model does not have, of whichever rank's rows.
        """
        data: list[tuple[Datum, ...]] = [()] * shape.models
        for one in owners:
            data[one.shape.place] = one.data
        rows = padded(data, shape)
        for name, ids in (("tokens", rows.ids), ("target_tokens", rows.targets)):
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= self.vocabulary:
                raise ValueError(
                    f"{name} are from {least} to {most}, but the model has ids from 0 to "
                    f"{self.vocabulary - 1}: send ids of its tokenizer"
                )
        losses = []
        for one in owners:
            mask = one.targets(rows.mask).to(self.device)
            losses.append((padded_inputs(one.data, mask), mask))
        return rows, losses

    def _own_logprobs(
        self, rows: Padded, shares: Shares, spec: ModelSpec, flats: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs [B, T, K] of this rank's rows, and the leaf [M, P] of its models."""
        rank, part = self._ranks.rank, shares.part
        own = [flats[one] if one < len(flats) else None for one in shares.models_of(rank)]
        model, leaf = self._weights.enter(spec, own)
        ids = shares.cut(rows.ids, rank).to(self.device)
        targets = shares.cut(rows.targets, rank).to(self.device)
        hidden, head = decoder_call(model)(input_ids=ids), model.get_output_embeddings()
        states = hidden.reshape(part.models, -1, hidden.shape[-1])
        wanted = targets.reshape(part.models, -1, targets.shape[-1])
        found = target_logprobs(states, head, wanted, self.vocabulary, self._softcap)
        return found.reshape(targets.shape), leaf

    def _gradients(
        self, totals: Sequence[Tensor], own: Tensor, leaf: Tensor, shares: Shares
    ) -> Tensor:
        """Return the gradients [M, P] of all models, through the log-probs of all ranks."""
        # A rank of padding alone has no row in any loss, and backpropagates zeros.
        (torch.stack(list(totals)).sum() + _zero_of(own)).backward()
        return self._weights.gradients(leaf, shares, self._ranks)


def _zero_of(values: Tensor) -> Tensor:
    """Return 0, whose gradient is zeros for all of the values."""
    return torch.where(torch.zeros_like(values, dtype=torch.bool), values, 0.0).sum()
