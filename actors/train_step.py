"""The three-channel optimizer step on tensors: forward, losses, backward, one update.

It knows a model, its frozen reference and an optimizer; not where batches and teacher signals come
from. What a channel's loss is stands in `train_policy`, `train_sdpo` and `train_replay`. Each is
divided by its own count over the whole step, so microbatches just add up.

Axes: N hinted response tokens, H hidden size.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors import train_policy, train_replay
from composer_mesh.actors.language_model import LanguageModel
from composer_mesh.actors.train_policy import Figures, PolicyChannel, new_figures
from composer_mesh.actors.train_replay import ReplayChannel, longest_tokens
from composer_mesh.actors.train_sdpo import SdpoChannel, signals_by_trace
from composer_mesh.configs.schema import Config, TrainerConfig
from composer_mesh.losses.composition import compose
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.packing import microbatches


@dataclass
class _Sums:
    """Running sums over the microbatches of one step; None while a channel has no data."""

    policy: Tensor | None = None
    sdpo: Tensor | None = None
    replay: Tensor | None = None
    figures: Figures = field(default_factory=new_figures)

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


def needs_reference(config: Config) -> bool:
    """Whether any channel reads the log-probs of the frozen initial policy."""
    return train_policy.needs_reference(config.loss) or train_replay.needs_reference(config.replay)


class ThreeChannelStep:
    """Owns the optimizer of one model; `reference` is frozen, None where no channel needs one."""

    def __init__(self, model: Any, reference: Any | None, config: Config) -> None:
        self._model, self._config = LanguageModel(model), config
        frozen = None if reference is None else LanguageModel(reference)
        self._policy = PolicyChannel(config, frozen)
        self._sdpo = SdpoChannel(config)
        self._replay = ReplayChannel(config.replay, frozen)
        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )

    def run(self, batch: StepBatch, signal: Tensor | None) -> dict[str, float | None]:
        """One update; returns the step's `loss/…`, `policy/…` and `tokens/…` metrics.

        `signal` holds the teacher's hidden states [N, H] for the tokens of `batch.views`, in their
        order, made with the weights that this step trains.
        """
        if self._config.sdpo.on and batch.views and signal is None:
            raise ValueError(f"step {batch.step} has {len(batch.views)} views but no signal")
        sums = _Sums()
        self._optimizer.zero_grad(set_to_none=True)
        self._train_traces(batch, signal, sums)
        if self._config.replay.on and batch.pairs:
            self._train_pairs(batch.pairs, sums)
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.model.parameters(), self._config.trainer.grad_clip, error_if_nonfinite=True
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
        distilled = None if sums.sdpo is None else float(sums.sdpo)
        sums.figures.update(self._policy.take_custom_metrics())
        sums.figures.update(self._sdpo.finish_step(distilled, batch.step))
        return {
            **total.metrics(),
            **dict(sorted(sums.figures.items())),
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "tokens/trained": batch.action_tokens,
        }

    def _train_traces(self, batch: StepBatch, signal: Tensor | None, sums: _Sums) -> None:
        views = signals_by_trace(batch.views, signal)
        lengths = [len(sample.ids) for sample in batch.samples]
        for indices in microbatches(lengths, self._config.trainer.microbatch_tokens):
            samples = [batch.samples[index] for index in indices]
            hidden = self._model.hidden([sample.ids for sample in samples])
            loss = self._policy.loss(self._model, samples, hidden, batch, sums.figures)
            sums.add("policy", loss)
            sdpo = self._sdpo.loss(self._model, samples, hidden, views, batch.sdpo_tokens)
            if sdpo is not None:
                sums.add("sdpo", sdpo)
                loss = loss + self._config.sdpo.alpha * sdpo
            loss.backward()

    def _train_pairs(self, pairs: list[PairSample], sums: _Sums) -> None:
        longest = [longest_tokens(pair) for pair in pairs]
        budget = max(self._config.trainer.microbatch_tokens, max(longest))
        for indices in microbatches(longest, budget):
            chunk = [pairs[index] for index in indices]
            result = self._replay.loss(self._model, chunk, len(pairs))
            sums.add("replay", result.loss)
            sums.figures["replay/accuracy"] += float(result.accuracy)
            (self._config.replay.beta * result.loss).backward()
