"""The three-channel optimizer step on tensors: forward, losses, backward, one update.

It knows a model, its frozen reference and an optimizer; not where batches and teacher signals come
from. Each channel is divided by its own count over the whole step, so microbatches just add up.

Axes: B sequences of a microbatch, T their padded length, V vocabulary, N hinted response tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.configs.schema import Config, TrainerConfig
from composer_mesh.losses.composition import compose
from composer_mesh.losses.distillation import generalized_jsd
from composer_mesh.losses.policy import grpo_loss, token_logprobs
from composer_mesh.losses.preference import dpo_loss, sequence_logprobs
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.packing import microbatches


@dataclass
class _Sums:
    """Running sums over the microbatches of one step; None while a channel has no data."""

    policy: Tensor | None = None
    sdpo: Tensor | None = None
    replay: Tensor | None = None
    figures: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, channel: str, loss: Tensor) -> None:
        before = getattr(self, channel)
        setattr(self, channel, loss.detach() + (0.0 if before is None else before))


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """The rate of a step (0-based): linear warm-up, then the schedule down to 0 at `steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))


class ThreeChannelStep:
    """Owns the optimizer of one model; `reference` is frozen and may be None without replay."""

    def __init__(self, model: Any, reference: Any | None, config: Config) -> None:
        self._model, self._reference, self._config = model, reference, config
        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )

    def run(self, batch: StepBatch, signal: Tensor | None) -> dict[str, float | None]:
        """One update; returns the step's `loss/…`, `policy/…` and `tokens/…` metrics.

        `signal` holds the teacher's logits [N, V] for the tokens of `batch.views`, in their order.
        """
        if self._config.sdpo.on and batch.views and signal is None:
            raise ValueError(f"step {batch.step} has {len(batch.views)} views but no signal")
        sums = _Sums()
        self._optimizer.zero_grad(set_to_none=True)
        self._train_traces(batch, signal, sums)
        if self._config.replay.on and batch.pairs:
            self._train_pairs(batch.pairs, sums)
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._config.trainer.grad_clip, error_if_nonfinite=True
        )
        rate = learning_rate(self._config.trainer, batch.step, self._config.run.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return self._metrics(batch, sums, float(norm), rate)

    def _metrics(
        self, batch: StepBatch, sums: _Sums, norm: float, rate: float
    ) -> dict[str, float | None]:
        alpha, beta = self._config.sdpo.alpha, self._config.replay.beta
        total = compose(sums.policy, sums.sdpo, sums.replay, alpha=alpha, beta=beta)
        return {
            **total.metrics(),
            **dict(sorted(sums.figures.items())),
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "tokens/trained": batch.action_tokens,
        }

    def _train_traces(self, batch: StepBatch, signal: Tensor | None, sums: _Sums) -> None:
        views = _signals_by_trace(batch.views, signal)
        lengths = [len(sample.ids) for sample in batch.samples]
        for indices in microbatches(lengths, self._config.trainer.microbatch_tokens):
            samples = [batch.samples[index] for index in indices]
            logits = self._logits(self._model, [sample.ids for sample in samples])
            loss = self._policy_loss(samples, logits, batch.action_tokens, sums)
            sdpo = self._sdpo_loss(samples, logits, views, batch.sdpo_tokens)
            if sdpo is not None:
                sums.add("sdpo", sdpo)
                loss = loss + self._config.sdpo.alpha * sdpo
            loss.backward()

    def _policy_loss(
        self, samples: list[PolicySample], logits: Tensor, normalizer: int, sums: _Sums
    ) -> Tensor:
        ids = _padded([sample.ids for sample in samples])[:, 1:]
        mask = _padded([sample.mask for sample in samples])[:, 1:].bool()
        behaviour = _padded([sample.logprobs for sample in samples])[:, 1:]
        advantages = torch.tensor([sample.advantage for sample in samples])
        temperature = self._config.generator.temperature
        result = grpo_loss(
            token_logprobs(logits[:, :-1], ids, temperature),
            behaviour,
            advantages,
            mask,
            normalizer=max(1, normalizer),
            clip_low=self._config.grpo.clip_low,
            clip_high=self._config.grpo.clip_high,
        )
        sums.add("policy", result.loss)
        sums.figures["policy/clipped_fraction"] += float(result.clipped_fraction)
        sums.figures["policy/kl_sampler"] += float(result.kl_k3)
        return result.loss

    def _sdpo_loss(
        self,
        samples: list[PolicySample],
        logits: Tensor,
        views: dict[str, list[tuple[HintedView, Tensor]]],
        normalizer: int,
    ) -> Tensor | None:
        student, teacher = [], []
        for row, sample in enumerate(samples):
            for view, signal in views.get(sample.trace_id, []):
                student.append(logits[row, view.student_rows])
                teacher.append(signal)
        if not student:
            return None
        rows = torch.cat(student)
        return generalized_jsd(
            rows,
            torch.cat(teacher),
            torch.ones(len(rows), dtype=torch.bool),
            beta=self._config.sdpo.jsd_beta,
            temperature=self._config.sdpo.temperature,
            normalizer=normalizer,
        )

    def _train_pairs(self, pairs: list[PairSample], sums: _Sums) -> None:
        if self._reference is None:
            raise ValueError(f"{len(pairs)} pairs need a reference model: load one")
        longest = [
            2 * (len(p.context_ids) + max(len(p.chosen_ids), len(p.rejected_ids))) for p in pairs
        ]
        budget = max(self._config.trainer.microbatch_tokens, max(longest))
        for indices in microbatches(longest, budget):
            chunk = [pairs[index] for index in indices]
            chosen, rejected = self._answers(self._model, chunk)
            with torch.no_grad():
                reference_chosen, reference_rejected = self._answers(self._reference, chunk)
            result = dpo_loss(
                chosen,
                rejected,
                reference_chosen,
                reference_rejected,
                beta=self._config.replay.dpo_beta,
                normalizer=len(pairs),
            )
            sums.add("replay", result.loss)
            sums.figures["replay/accuracy"] += float(result.accuracy)
            (self._config.replay.beta * result.loss).backward()

    def _answers(self, model: Any, pairs: list[PairSample]) -> tuple[Tensor, Tensor]:
        """Summed log-probs [B] of the chosen and of the rejected answers."""
        answers = [p.chosen_ids for p in pairs] + [p.rejected_ids for p in pairs]
        contexts = [p.context_ids for p in pairs] * 2
        ids = [context + answer for context, answer in zip(contexts, answers, strict=True)]
        masks = [[False] * len(c) + [True] * len(a) for c, a in zip(contexts, answers, strict=True)]
        logits = self._logits(model, ids)
        logprobs = token_logprobs(logits[:, :-1], _padded(ids)[:, 1:])
        sums = sequence_logprobs(logprobs, _padded(masks)[:, 1:].bool())
        return sums[: len(pairs)], sums[len(pairs) :]

    def _logits(self, model: Any, sequences: list[list[int]]) -> Tensor:
        """Logits [B, T, V] of right-padded sequences."""
        ids = _padded(sequences)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits


def _padded(rows: Sequence[Sequence[Any]]) -> Tensor:
    """Rows of numbers [B, T], zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _signals_by_trace(
    views: list[HintedView], signal: Tensor | None
) -> dict[str, list[tuple[HintedView, Tensor]]]:
    """Each view with its rows of the signal, by the trace that it belongs to."""
    found: dict[str, list[tuple[HintedView, Tensor]]] = defaultdict(list)
    if signal is not None:
        for view, rows in zip(views, _split(views, signal), strict=True):
            found[view.trace_id].append((view, rows))
    return found


def _split(views: list[HintedView], signal: Tensor) -> Iterator[Tensor]:
    counts = [len(view.targets) for view in views]
    if sum(counts) != len(signal):
        raise ValueError(
            f"the signal has {len(signal)} rows but the views have {sum(counts)} tokens: build "
            "both from the same batch"
        )
    return iter(signal.split(counts))
