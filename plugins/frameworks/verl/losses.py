"""Loss functions for verl's engines: verl's own PPO loss with the SDPO term, and pairs.

An engine calls a loss function twice for each microbatch, as verl's `distillation_ppo_loss`: with
whole logits (`student_logits`) for values of each token, which come back in `model_output`, and
then for the loss. Only batches with the flag `distillation_use_topk` get the first call.

Axes: N packed tokens of a microbatch, n hinted tokens of it, V vocabulary, K kept entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.channels.step import POLICY, Term, own_weights, step_loss
from composer_mesh.losses.distillation import generalized_jsd, topk_distillation

HINT_ROWS = "composer_hint_rows"
"""Of each row, where in its sequence hinted tokens are predicted, jagged [B, n]."""
HINT_LOGPROBS = "composer_hint_logprobs"
"""The teacher's log-probs at these, jagged [B, n, V], or [B, n, K] with `HINT_IDS`."""
HINT_IDS = "composer_hint_ids"
HINT_TOKENS = "composer_hint_tokens"
"""Hinted tokens of the whole step, over all ranks."""
NUMBER, PULL = "composer_row", "composer_pull"


@dataclass(frozen=True)
class VerlChannels:
    """Weights and options of the two channels in addition to verl's policy loss.

    With `top_k` the teacher's signal is its K likeliest entries and the mass of the rest, in place
    of the whole vocabulary.
    """

    alpha: float = 0.0
    beta: float = 0.0
    jsd_beta: float = 0.5
    top_k: int | None = None
    dpo_beta: float = 0.1


@dataclass
class PolicyAndSdpoLoss:
    """verl's `ppo_loss` by its actor's config, + alpha * JSD at the hinted tokens of a batch.

    A loss function for `TrainingWorker.set_loss_fn` and for `train_batch` of an engine.
    """

    actor: Any
    channels: VerlChannels

    def __call__(
        self,
        model_output: Any = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
    ) -> Any:
        """Return the loss and its metrics; of `student_logits` values by name, [1, N] each."""
        if student_logits is not None:
            return {"sdpo": self.divergences(student_logits, data)}
        from verl.workers.utils.losses import ppo_loss

        loss, metrics = ppo_loss(self.actor, model_output, data, dp_group)
        terms: dict[str, Term] = {POLICY: lambda: loss}
        if "sdpo" in model_output:
            share = data["dp_size"] / data[HINT_TOKENS]
            terms["sdpo"] = lambda: model_output["sdpo"].values().sum() * share
        found = step_loss(terms, own_weights(self.channels.alpha, self.channels.beta))
        own = {f"loss/{name}": float(one) for name, one in found.losses.items()}
        return found.total(), metrics | own

    def divergences(self, student_logits: Tensor, data: Any) -> Tensor:
        """Return the JSD [1, N] of each hinted token to the teacher, in nats; 0 at all others."""
        logits = whole(student_logits, data)
        rows = packed_rows(data, data[HINT_ROWS])
        student, teacher = logits[rows].float(), data[HINT_LOGPROBS].values()
        every = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
        options: dict[str, Any] = {"jsd_beta": self.channels.jsd_beta, "reduction": "none"}
        if HINT_IDS in data:
            kept = student.log_softmax(-1).gather(-1, data[HINT_IDS].values())
            found = topk_distillation(kept, teacher, every, **options)
        else:
            found = generalized_jsd(student, teacher, every, **options)
        empty = logits.new_zeros(logits.shape[0], dtype=found.dtype)
        return empty.index_put((rows,), found).unsqueeze(0)


@dataclass
class TeacherSignals:
    """Keeps the log-probs of hinted contexts; for `infer_batch` of the engine that is the teacher.

    `found` has them by the number of a view: log-probs [n, V] and None, or [n, K] and their ids.
    """

    top_k: int | None = None
    found: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def __call__(
        self,
        model_output: Any = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
    ) -> Any:
        """Keep the signals of a microbatch; the loss is 0."""
        del model_output, dp_group
        if student_logits is None:
            return torch.zeros(()), {}
        logits = whole(student_logits, data)
        scores = logits[packed_rows(data, data[HINT_ROWS])].float().log_softmax(-1)
        lengths = data[HINT_ROWS].offsets().diff().tolist()
        parts = scores.split(lengths)
        for number, one in zip(data[NUMBER].tolist(), parts, strict=True):
            self.found[number] = self._kept(one)
        return {}

    def _kept(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.top_k is None:
            return scores, None
        kept = scores.topk(min(self.top_k, scores.shape[-1]), dim=-1)
        return kept.values, kept.indices


def pull_loss(
    model_output: Any = None, data: Any = None, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Sum of each answer's log-prob times what its preference loss pulls it by.

    Its gradient is that of the preference loss, whichever microbatches the sides of a pair are in.
    """
    del dp_group
    logprobs = answer_logprobs(model_output, data)
    return (data[PULL] * logprobs).sum(), {}


def answer_logprobs(model_output: Any, data: Any) -> Tensor:
    """Return the summed log-prob of each row's response [B], in nats."""
    from verl.workers.utils.padding import no_padding_2_padding

    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    mask = data["response_mask"].to_padded_tensor(0)
    return (logprobs * mask).sum(-1)


def whole(student_logits: Tensor, data: Any) -> Tensor:
    """Return the logits [N, V] of a microbatch; raises ValueError where a rank has only a part."""
    tokens = int(data["input_ids"].values().shape[0])
    if student_logits.shape[1] != tokens:
        raise ValueError(
            f"a rank has the logits of {student_logits.shape[1]} positions for {tokens} tokens: "
            "the SDPO term needs ulysses_sequence_parallel_size 1 and pad_to_length off"
        )
    return student_logits[0]


def packed_rows(data: Any, rows: Tensor) -> Tensor:
    """Return positions within sequences, jagged [B, n], as rows of the packed microbatch [n]."""
    starts, counts = data["input_ids"].offsets()[:-1], rows.offsets().diff()
    return rows.values() + starts.repeat_interleave(counts)


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Return tensors of equal trailing shapes as one jagged tensor [B, *, …]."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
