"""The policy channel of a step: computes the configured policy loss on sampled sequences.

The function of each loss type is in `configured_loss`.

Axes: B sequences of a microbatch, T their padded length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_mesh.actors.learning.logprob_mismatch import LogprobMismatch, figures
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.learning.update_pass import MicrobatchStates, TrainedChannel
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import release
from composer_mesh.channels.policy import (
    Tokens,
    correction_weights,
    policy_loss,
)
from composer_mesh.channels.step import POLICY, Figures, unread
from composer_mesh.configs import losses as configs
from composer_mesh.configs.losses import CorrectedLoss, TokenLoss
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom import (
    LossInputs,
    MetricSum,
    check_needs,
    check_signature,
    custom_policy_loss,
    load_function,
)
from composer_mesh.losses.entropy import high_entropy_mask, linear_entropies
from composer_mesh.losses.fused import linear_logits, linear_scores
from composer_mesh.losses.policy import Aggregation, aggregation_normalizer, token_entropies
from composer_mesh.rollouts.batches import BatchCounts, PolicySample


class PolicyChannel(TrainedChannel):
    """Computes the configured policy loss; `reference` is the frozen policy, if needed.

    `custom` observes the calls of a custom loss.
    """

    name = POLICY

    def __init__(
        self,
        config: Config,
        reference: LanguageModel | None,
        custom: RunningCall | None = None,
    ) -> None:
        self._loss, self._temperature = config.loss, config.generator.temperature
        written = config.environment.max_turns * config.generator.max_new_tokens
        self._longest = min(written, config.policy.max_context)
        self._chosen_share = 1.0
        if isinstance(config.loss, TokenLoss):
            self._chosen_share = config.loss.top_entropy_quantile
        self._reference = reference if config.loss.needs_reference else None
        if config.loss.needs_reference and reference is None:
            raise ValueError(f"loss {config.loss.type!r} needs a reference model: load one")
        self._bound = config.logprob_mismatch.bound
        self.begin_step()
        if isinstance(config.loss, configs.CustomLoss):
            function = load_function(config.loss.import_path)
            check_signature(function, config.loss.import_path, config.loss.kwargs)
            check_needs(function, config.loss.import_path, config.loss.needs)
            custom = custom or RunningCall(config.supervision.custom_function_s)
            self._function = custom.watched(function, config.loss.import_path)

    def term(self, states: MicrobatchStates, /) -> Tensor | None:
        """Return the loss of a microbatch's samples; None without any."""
        one, loss = states.one, None
        if states.of_samples is not None:
            loss = self.loss(
                one.model, states.samples, states.of_samples, one.counts, one.sums.figures
            )
        self.run_with_others(one.reference[states.index] if one.reference else 0)
        return loss

    def loss(
        self,
        model: LanguageModel,
        samples: list[PolicySample],
        hidden: HiddenStates,
        counts: BatchCounts,
        figures: dict[str, Any],
    ) -> Tensor:
        """Return the loss of some samples, divided by the normalizer of their whole batch."""
        tokens = self._tokens(model, samples, hidden, counts.version)
        # The log-probs of ids that no policy sampled are not known.
        sampled = any(version >= 0 for sample in samples for version in sample.versions)
        if sampled and (self._start or not self._moved):
            self._logprob_mismatch.note(tokens.start, tokens.sampling, tokens.mask, tokens.current)
        if isinstance(self._loss, configs.CustomLoss):
            requested = requested_fields(self._loss, model, hidden, tokens.mask, self._temperature)
            return self._custom(self._loss, tokens, samples, requested, counts.action_tokens)
        weights = self._correction(tokens)
        found = policy_loss(self._loss, tokens, self._normalizer(counts), weights)
        figures["policy/clipped_fraction"] += unread(found.clipped_fraction)
        for name in ("kl_reference", "filtered_fraction"):
            if (figure := getattr(found, name)) is not None:
                figures[f"policy/{name}"] += unread(figure)
        if not self._loss.entropy_coef:
            return found.loss
        entropy = self._entropy(model, hidden, tokens.mask, max(1, counts.action_tokens))
        figures["policy/entropy"] += unread(entropy)
        return found.loss - self._loss.entropy_coef * entropy

    def _entropy(
        self, model: LanguageModel, hidden: HiddenStates, mask: Tensor, count: int
    ) -> Tensor:
        """Return the summed entropy of the sampled tokens, divided by the step's token count."""

        def rows_entropy(scores: Tensor, _rows: slice) -> Tensor:
            return token_entropies(scores, self._temperature).sum() / count

        rows = hidden.predicting(mask)
        own = linear_scores(
            rows_entropy, rows.states, model.weight, bias=model.bias, softcap=model.softcap
        )
        return rows.sum(own)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a frozen policy in this process."""
        return self._reference is not None

    @torch.no_grad()
    def run_with_others(self, forwards: int) -> None:
        """Run a sharded reference as often as the rank whose microbatch needs most forwards of it.

        Those of the microbatch's own samples, which `loss` has just run, count.
        """
        if self._reference is None:
            return
        for _ in range(forwards - self._reference.forwards):
            self._reference.dummy_forward()
        self._reference.forwards = 0
        release(self._reference.model)

    def begin_step(self) -> None:
        """Forget the previous step."""
        self._custom_metrics: dict[str, MetricSum] = {}
        self._logprob_mismatch = LogprobMismatch(self._bound)
        self._start = StepStart(self._temperature, self._chosen_share)
        self._moved = False

    def updated(self) -> None:
        """Note that the weights are no longer those of the step's start."""
        self._moved = True

    def needs_start(self, updates: int) -> bool:
        """Whether so many updates of a step need the log-probs or entropies of its start."""
        loss = self._loss
        if isinstance(loss, CorrectedLoss):
            chosen = isinstance(loss, TokenLoss) and loss.top_entropy_quantile < 1
            return chosen or (updates > 1 and loss.correction != "none")
        return isinstance(loss, configs.DecoupledPpoLoss) and updates > 1

    def remember(
        self, model: LanguageModel, samples: Sequence[PolicySample], hidden: HiddenStates
    ) -> None:
        """Keep what the updates of the step need of some samples."""
        self._start.add(model, samples, hidden, *_ids_and_mask(samples, hidden.computed.device))

    def note_without_replay(
        self, model: LanguageModel, samples: Sequence[PolicySample], hidden: HiddenStates
    ) -> None:
        """Measure the mismatch of states that were computed with the trainer's own experts."""
        ids, mask = _ids_and_mask(samples, hidden.computed.device)
        found = model.logprobs(hidden, ids, mask, self._temperature)
        sampling = padded([sample.logprobs for sample in samples])[:, 1:].to(mask.device)
        self._logprob_mismatch.note_without_replay(found, sampling, mask)

    def remembered(self, ranks: Ranks) -> None:
        """Note that all samples of the step are remembered. Collective."""
        self._start.choose(ranks)

    def measured(self) -> Any:
        """Return the metrics so far, for `forget_since`."""
        return copy.deepcopy((self._custom_metrics, self._logprob_mismatch))

    def forget_since(self, measured: Any) -> None:
        """Take the metrics back to what they were: what was measured since is measured again."""
        self._custom_metrics, self._logprob_mismatch = measured

    def finish_step(self, _loss: float | None, _step: int, ranks: Ranks, /) -> Figures:
        """Return this step's metrics over all ranks: `logprob_mismatch/…`, `policy/custom/…`."""
        measured = ranks.of_shares(self._logprob_mismatch.on_cpu())
        return figures(measured) | self._custom_means(ranks)

    def _custom_means(self, ranks: Ranks) -> Figures:
        totals: dict[str, MetricSum] = {}
        for metrics in ranks.of_shares(self._custom_metrics):
            for name, metric in metrics.items():
                totals[name] = totals[name] + metric if name in totals else metric
        return {f"policy/custom/{name}": metric.mean for name, metric in totals.items()}

    def _normalizer(self, counts: BatchCounts) -> int:
        kind: Aggregation = getattr(self._loss, "aggregation", "dapo")
        count = aggregation_normalizer(
            kind,
            sequences=counts.sequences,
            tokens=counts.action_tokens,
            max_completion_length=self._longest,
        )
        return max(1, count)

    def _correction(self, tokens: Tokens) -> Tensor | None:
        """Return the loss's correction weights and record them; None where it has no correction."""
        if (weights := correction_weights(self._loss, tokens)) is None:
            return None
        unbounded = correction_weights(self._loss, tokens, bounded=False)
        assert unbounded is not None
        self._logprob_mismatch.note_weights(weights, unbounded, tokens.mask)
        return weights

    def _tokens(
        self, model: LanguageModel, samples: list[PolicySample], hidden: HiddenStates, version: int
    ) -> Tokens:
        sequences, device = [sample.ids for sample in samples], hidden.computed.device
        ids, mask = _ids_and_mask(samples, device)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                states = self._reference.hidden(sequences)
                reference = self._reference.logprobs(states, ids, mask, self._temperature)
        logprobs = model.logprobs(hidden, ids, mask, self._temperature)
        return Tokens(
            logprobs=logprobs,
            start=self._start.logprobs(samples, device) if self._start else logprobs.detach(),
            sampling=padded([sample.logprobs for sample in samples])[:, 1:].to(device),
            reference=reference,
            advantages=advantages_of(samples).to(device),
            mask=mask,
            current=(padded([sample.versions for sample in samples])[:, 1:] == version).to(device),
            chosen=self._start.chosen(samples, device),
        )

    def _custom(
        self,
        loss: configs.CustomLoss,
        tokens: Tokens,
        samples: Sequence[PolicySample],
        requested: Sequence[dict[str, Tensor]],
        count: int,
    ) -> Tensor:
        inputs = [
            replace(_loss_inputs(tokens, row, len(sample.ids) - 1), **requested[row])
            for row, sample in enumerate(samples)
        ]
        found, metrics = custom_policy_loss(
            self._function,
            loss.import_path,
            loss.kwargs,
            inputs,
            normalizer=max(1, count),
            ids=[sample.trace_id for sample in samples],
        )
        for name, metric in metrics.items():
            before = self._custom_metrics.get(name)
            self._custom_metrics[name] = metric if before is None else before + metric
        return found


def _ids_and_mask(samples: Sequence[PolicySample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids [B, T] and the mask [B, T - 1] of those that are trained."""
    mask = padded([sample.mask for sample in samples])[:, 1:].bool()
    return padded([sample.ids for sample in samples]).to(device), mask.to(device)


def advantages_of(samples: Sequence[PolicySample]) -> Tensor:
    """Return the advantages of some sequences: [B], or [B, T - 1] if any has one for each token."""
    if not any(isinstance(sample.advantage, list) for sample in samples):
        return torch.tensor([sample.advantage for sample in samples])
    rows = [
        sample.advantage
        if isinstance(sample.advantage, list)
        else [sample.advantage] * len(sample.ids)
        for sample in samples
    ]
    return padded(rows)[:, 1:]


def _loss_inputs(tokens: Tokens, row: int, length: int) -> LossInputs:
    mask, advantage = tokens.mask[row, :length], tokens.advantages[row]
    return LossInputs(
        trainer_logprobs=tokens.logprobs[row, :length],
        inference_logprobs=tokens.sampling[row, :length],
        ref_logprobs=None if tokens.reference is None else tokens.reference[row, :length],
        advantages=advantage[:length] if advantage.ndim else advantage.expand(length),
        loss_mask=mask,
    )


def requested_fields(
    loss: configs.CustomLoss,
    model: LanguageModel,
    hidden: HiddenStates,
    mask: Tensor,
    temperature: float,
) -> list[dict[str, Tensor]]:
    """Return the fields that a custom loss needs beyond log-probs, of each sequence.

    `mask` is [B, T - 1]; only "logits" makes scores of all sampled tokens.
    """
    rows, counts = hidden.predicting(mask), mask.sum(-1).tolist()
    found: dict[str, Tensor] = {}
    if "hidden_states" in loss.needs:
        found["hidden_states"] = rows.states
    if "entropies" in loss.needs:
        found["entropies"] = linear_entropies(
            rows.states,
            model.weight,
            bias=model.bias,
            softcap=model.softcap,
            temperature=temperature,
        )
    if "logits" in loss.needs:
        found["logits"] = linear_logits(
            rows.states, model.weight, model.bias, temperature, softcap=model.softcap
        )
    parts = {name: rows.whole(tensor).split(counts) for name, tensor in found.items()}
    return [{name: split[row] for name, split in parts.items()} for row in range(len(mask))]


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
