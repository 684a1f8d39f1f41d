"""The three-channel optimizer step on tensors: forward, losses, backward, one update.

It knows a model, its frozen reference and an optimizer; not where batches and teacher signals come
from. What a channel's loss is stands in `train_policy`, `train_sdpo` and `train_replay`. Each is
divided by its own count over the whole step, so microbatches and ranks just add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors import train_policy
from composer_mesh.actors.inbox import SignalsLost
from composer_mesh.actors.language_model import LanguageModel
from composer_mesh.actors.ranks import Ranks
from composer_mesh.actors.train_policy import Figures, PolicyChannel, new_figures
from composer_mesh.actors.train_replay import ReplayChannel
from composer_mesh.actors.train_sdpo import SdpoChannel, SignalSource, StudentRows
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.losses.composition import compose
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.packing import microbatches
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, pair_tokens, plan_step

CHANNELS = ("policy", "sdpo", "replay")


@dataclass
class _Sums:
    """Running sums over the microbatches of one step; a channel without data has none."""

    losses: dict[str, float] = field(default_factory=dict)
    figures: Figures = field(default_factory=new_figures)

    def add(self, channel: str, loss: Tensor) -> None:
        self.losses[channel] = self.losses.get(channel, 0.0) + loss.detach().double().item()

    @classmethod
    def of_ranks(cls, parts: Sequence["_Sums"]) -> "_Sums":
        """The sums of all ranks, in their order."""
        total = cls()
        for part in parts:
            for channel, loss in part.losses.items():
                total.losses[channel] = total.losses.get(channel, 0.0) + loss
            for name, figure in part.figures.items():
                total.figures[name] += figure
        return total


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
    """Whether the step itself computes the log-probs of the frozen initial policy."""
    return train_policy.needs_reference(config.loss)


class ThreeChannelStep:
    """Owns the optimizer of one model; `reference` is frozen, None where the loss needs none."""

    def __init__(
        self, model: Any, reference: Any | None, config: Config, ranks: Ranks | None = None
    ) -> None:
        self._model, self._config, self._ranks = LanguageModel(model), config, ranks or Ranks()
        frozen = None if reference is None else LanguageModel(reference)
        self._policy = PolicyChannel(config, frozen)
        self._sdpo = SdpoChannel(config)
        self._replay = ReplayChannel(config.replay)
        trainer = config.trainer
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights. Shares memory with the optimizer."""
        return {"optimizer": self._optimizer.state_dict(), "taid": self._sdpo.taid.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._sdpo.taid.load_state_dict(state["taid"])

    def plan(self, batch: StepBatch) -> RankPlan:
        """This rank's share of a step."""
        budget = self._config.trainer.microbatch_tokens
        return plan_step(batch, budget, self._ranks.size)[self._ranks.rank]

    def run(self, batch: StepBatch, source: SignalSource | None) -> dict[str, float | None]:
        """One update; returns the step's `loss/…`, `policy/…` and `tokens/…` metrics.

        `source` gives the teacher's signal for the views of each microbatch. When it raises
        `SignalsLost`, on any rank, the step begins again without the SDPO channel.
        """
        if self._config.sdpo.on and batch.views and source is None:
            raise ValueError(f"step {batch.step} has {len(batch.views)} views but no signal")
        lost = False
        try:
            sums = self._accumulate(batch, source)
        except SignalsLost:
            lost = True
        lost = self._ranks.any(lost)
        if lost:
            sums = self._accumulate(batch, None)
        sums = _Sums.of_ranks(self._ranks.gather(sums))
        if lost:
            sums.figures["sdpo/lost_steps"] = 1
        norm, rate = self._update(batch.step)
        return self._metrics(batch, sums, norm, rate)

    def _accumulate(self, batch: StepBatch, source: SignalSource | None) -> _Sums:
        """Gradients of this rank's share, from nothing."""
        sums, plan = _Sums(), self.plan(batch)
        self._optimizer.zero_grad(set_to_none=True)
        self._policy.begin_step()
        for index, microbatch in enumerate(plan.microbatches):
            self._train_traces(index, microbatch, batch, source, sums)
        if self._config.replay.on:
            self._train_pairs(batch, plan.pairs, sums)
        return sums

    def _update(self, step: int) -> tuple[float, float]:
        parameters = list(self._model.model.parameters())
        self._ranks.sum_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(
            parameters, self._config.trainer.grad_clip, error_if_nonfinite=True
        )
        rate = learning_rate(self._config.trainer, step, self._config.run.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return float(norm), rate

    def _metrics(
        self, batch: StepBatch, sums: _Sums, norm: float, rate: float
    ) -> dict[str, float | None]:
        alpha, beta = self._config.sdpo.alpha, self._config.replay.beta
        losses = {
            name: torch.tensor(sums.losses[name], dtype=torch.float64)
            for name in CHANNELS
            if name in sums.losses
        }
        channels = (losses.get(name) for name in CHANNELS)
        total = compose(*channels, alpha=alpha, beta=beta)
        sums.figures.update(self._policy.custom_means(self._ranks))
        sums.figures.update(self._sdpo.finish_step(sums.losses.get("sdpo"), batch.step))
        return {
            **total.metrics(),
            **dict(sorted(sums.figures.items())),
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "tokens/trained": batch.action_tokens,
        }

    def _train_traces(
        self,
        index: int,
        microbatch: Microbatch,
        batch: StepBatch,
        source: SignalSource | None,
        sums: _Sums,
    ) -> None:
        samples = [batch.samples[place] for place in microbatch.samples]
        hidden = self._model.hidden([sample.ids for sample in samples])
        loss = self._policy.loss(self._model, samples, hidden, batch, sums.figures)
        sums.add("policy", loss)
        if source is not None and microbatch.views:
            sdpo = self._distil(index, microbatch, samples, hidden, batch, source)
            sums.add("sdpo", sdpo)
            loss = loss + self._config.sdpo.alpha * sdpo
        loss.backward()

    def _distil(
        self,
        index: int,
        microbatch: Microbatch,
        samples: Sequence[PolicySample],
        hidden: Tensor,
        batch: StepBatch,
        source: SignalSource,
    ) -> Tensor:
        views = [batch.views[place] for place in microbatch.views]
        places = {sample.trace_id: row for row, sample in enumerate(samples)}
        rows = StudentRows.of(
            self._model,
            hidden,
            [places[view.trace_id] for view in views],
            views,
            self._sdpo.temperature,
        )
        signal = source.take(index, views, lambda: rows.top_k(self._sdpo.top_k))
        return self._sdpo.loss(rows, signal, batch.sdpo_tokens)

    def _train_pairs(self, batch: StepBatch, places: Sequence[int], sums: _Sums) -> None:
        pairs = [batch.pairs[place] for place in places]
        longest = [pair_tokens(pair) for pair in pairs]
        budget = max([self._config.trainer.microbatch_tokens, *longest])
        for indices in microbatches(longest, budget):
            chunk = [pairs[index] for index in indices]
            result = self._replay.loss(self._model, chunk, len(batch.pairs))
            sums.add("replay", result.loss)
            sums.figures["replay/accuracy"] += float(result.accuracy)
            (self._config.replay.beta * result.loss).backward()
