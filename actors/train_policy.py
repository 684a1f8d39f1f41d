"""The policy channel of a step: from sampled sequences to the configured loss on rewards.

Which function a type of loss is, and what its log-probs are relative to, is decided here; the
functions are in `losses.policy`.

Axes: B sequences of a microbatch, T their padded length.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.language_model import LanguageModel, padded
from composer_mesh.actors.ranks import Ranks
from composer_mesh.configs import losses as configs
from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom import (
    LossInputs,
    MetricSum,
    check_signature,
    custom_policy_loss,
    load_function,
)
from composer_mesh.losses.logprobs import masked_log_ratio
from composer_mesh.losses.policy import (
    Aggregation,
    PolicyLoss,
    Rejection,
    aggregation_normalizer,
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    grpo_loss,
    prime_rl_loss,
    reinforce_loss,
    sampling_weights,
    sapo_loss,
)
from composer_mesh.losses.reductions import masked_sum
from composer_mesh.rollouts.batches import PolicySample, StepBatch

Figures = dict[str, float]
Loss = Callable[..., PolicyLoss]


@dataclass(frozen=True)
class Tokens:
    """A microbatch by token: position t is about the id at t + 1. All but advantages [B, T - 1]."""

    logprobs: Tensor
    sampling: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor


class PolicyChannel:
    """The configured policy loss. `reference` is the frozen policy, where the loss needs one."""

    def __init__(self, config: Config, reference: LanguageModel | None) -> None:
        self._loss, self._temperature = config.loss, config.generator.temperature
        self._longest = config.environment.max_turns * config.generator.max_new_tokens
        self._reference = reference if needs_reference(config.loss) else None
        if needs_reference(config.loss) and reference is None:
            raise ValueError(f"loss {config.loss.type!r} needs a reference model: load one")
        self._custom_metrics: dict[str, MetricSum] = {}
        if isinstance(config.loss, configs.CustomLoss):
            self._function = load_function(config.loss.import_path)
            check_signature(self._function, config.loss.import_path, config.loss.kwargs)

    def loss(
        self,
        model: LanguageModel,
        samples: list[PolicySample],
        hidden: Tensor,
        batch: StepBatch,
        figures: Figures,
    ) -> Tensor:
        """The loss of some samples of the batch, over the normalizer of the whole batch."""
        tokens = self._tokens(model, samples, hidden)
        count = max(1, batch.action_tokens)
        figures["policy/kl_sampler"] += _sampler_kl(tokens, count)
        if isinstance(self._loss, configs.CustomLoss):
            return self._custom(self._loss, tokens, samples, count)
        found = policy_loss(self._loss, tokens, self._normalizer(batch))
        figures["policy/clipped_fraction"] += float(found.clipped_fraction)
        for name in ("kl_reference", "filtered_fraction"):
            if (figure := getattr(found, name)) is not None:
                figures[f"policy/{name}"] += float(figure)
        return found.loss

    def begin_step(self) -> None:
        """Forget what a custom function reported in the step before."""
        self._custom_metrics = {}

    def custom_means(self, ranks: Ranks) -> Figures:
        """Means of what a custom function reported in this step, as `policy/custom/…`."""
        totals: dict[str, MetricSum] = {}
        for metrics in ranks.gather(self._custom_metrics):
            for name, metric in metrics.items():
                totals[name] = totals[name] + metric if name in totals else metric
        return {f"policy/custom/{name}": metric.mean for name, metric in totals.items()}

    def _normalizer(self, batch: StepBatch) -> int:
        kind: Aggregation = getattr(self._loss, "aggregation", "dapo")
        count = aggregation_normalizer(
            kind,
            sequences=len(batch.samples),
            tokens=batch.action_tokens,
            max_completion_length=self._longest,
        )
        return max(1, count)

    def _tokens(self, model: LanguageModel, samples: list[PolicySample], hidden: Tensor) -> Tokens:
        sequences = [sample.ids for sample in samples]
        ids = padded(sequences)
        mask = padded([sample.mask for sample in samples])[:, 1:].bool()
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                states = self._reference.hidden(sequences)
                reference = self._reference.logprobs(states, ids, mask, self._temperature)
        return Tokens(
            logprobs=model.logprobs(hidden, ids, mask, self._temperature),
            sampling=padded([sample.logprobs for sample in samples])[:, 1:],
            reference=reference,
            advantages=torch.tensor([sample.advantage for sample in samples]),
            mask=mask,
        )

    def _custom(
        self, loss: configs.CustomLoss, tokens: Tokens, samples: Sequence[PolicySample], count: int
    ) -> Tensor:
        inputs = [_loss_inputs(tokens, row, len(s.ids) - 1) for row, s in enumerate(samples)]
        found, metrics = custom_policy_loss(
            self._function,
            loss.import_path,
            loss.kwargs,
            inputs,
            normalizer=count,
            ids=[sample.trace_id for sample in samples],
        )
        for name, metric in metrics.items():
            before = self._custom_metrics.get(name)
            self._custom_metrics[name] = metric if before is None else before + metric
        return found


def needs_reference(loss: configs.LossConfig) -> bool:
    """Whether a loss reads the log-probs of the frozen initial policy."""
    if isinstance(loss, configs.CustomLoss):
        return loss.reference
    return getattr(loss, "kl_beta", 0.0) > 0


def policy_loss(loss: configs.LossConfig, tokens: Tokens, normalizer: int) -> PolicyLoss:
    """The loss that a section of the config describes."""
    now, then, advantages, mask = tokens.logprobs, tokens.sampling, tokens.advantages, tokens.mask
    match loss:
        case configs.GrpoLoss() | configs.CispoLoss() | configs.SapoLoss():
            return _ratio_loss(loss, tokens, normalizer)
        case configs.PrimeRlLoss() | configs.DppoLoss():
            masked: Loss = dppo_loss if isinstance(loss, configs.DppoLoss) else prime_rl_loss
            return masked(now, then, advantages, mask, normalizer=normalizer, **_options(loss))
        case configs.DecoupledPpoLoss():
            # One update a batch: the policy at its start, which is now, is the proximal one.
            options = _options(loss) | {"rejection": Rejection(**loss.rejection.model_dump())}
            return decoupled_ppo_loss(
                now, now.detach(), then, advantages, mask, normalizer=normalizer, **options
            )
        case configs.ReinforceLoss():
            return reinforce_loss(now, advantages, mask, normalizer=normalizer, **_options(loss))
    raise AssertionError(f"the config has a loss that nobody computes: {loss.type}")


def _ratio_loss(
    loss: configs.GrpoLoss | configs.CispoLoss | configs.SapoLoss, tokens: Tokens, normalizer: int
) -> PolicyLoss:
    functions: dict[str, Loss] = {"grpo": grpo_loss, "cispo": cispo_loss, "sapo": sapo_loss}
    old, weights = tokens.sampling, None
    if loss.correction != "none":
        old = tokens.logprobs.detach()
        weights = sampling_weights(
            old,
            tokens.sampling,
            tokens.mask,
            mode=loss.correction,
            maximum=loss.correction_maximum,
            minimum=loss.correction_minimum,
        )
    options = _options(loss)
    for name in ("correction", "correction_maximum", "correction_minimum"):
        del options[name]
    return functions[loss.type](
        tokens.logprobs,
        old,
        tokens.advantages,
        tokens.mask,
        normalizer=normalizer,
        reference_logprobs=tokens.reference,
        sampling_weights=weights,
        **options,
    )


def _options(loss: configs.LossConfig) -> dict[str, Any]:
    """The section's keys, which are the function's keywords."""
    return loss.model_dump(exclude={"type"})


def _loss_inputs(tokens: Tokens, row: int, length: int) -> LossInputs:
    mask = tokens.mask[row, :length]
    return LossInputs(
        trainer_logprobs=tokens.logprobs[row, :length],
        inference_logprobs=tokens.sampling[row, :length],
        ref_logprobs=None if tokens.reference is None else tokens.reference[row, :length],
        advantages=tokens.advantages[row].expand(length),
        loss_mask=mask,
    )


def _sampler_kl(tokens: Tokens, count: int) -> float:
    """KL(generator || trainer) of the sampled tokens by the k3 estimate: their mismatch."""
    log_ratio = masked_log_ratio(tokens.logprobs.detach(), tokens.sampling, tokens.mask)
    return float(masked_sum(torch.expm1(log_ratio) - log_ratio, tokens.mask, count))


def new_figures() -> Figures:
    """Sums of figures over the microbatches of a step."""
    return defaultdict(float)
