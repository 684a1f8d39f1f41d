"""`ComposerGRPOTrainer`: TRL's GRPOTrainer with the SDPO and the replay channel added to its loss.

    total = TRL's loss + alpha * sdpo + beta * replay

    ComposerGRPOTrainer(
        ...,
        sdpo=SdpoConfig(alpha=0.05),
        replay=PairLoss(beta=0.05),
        pairs=StoredPairs("pairs.jsonl"),
    )

All of TRL's arguments are its own, and with both weights 0 every step is its own, bit for bit.
`ComposerReplicationTrainer` is the same by the names of the composer-replication framework. Needs
the extra `trl`.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from composer_mesh.actors.learning.sdpo_channel import SdpoChannel
from composer_mesh.actors.models.policy import learning_every_id
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.channels.step import own_weights, step_total
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.channels import (
    Captured,
    Figures,
    FurtherChannels,
    base_model,
    is_sharded_by_fsdp2,
    share_forwards,
)
from composer_mesh.plugins.frameworks.trl.checks import (
    PairLoss,
    check_channels,
    check_head,
    check_sharded,
    check_trainer,
)
from composer_mesh.plugins.frameworks.trl.environments import TaskEnvironment
from composer_mesh.plugins.frameworks.trl.pairs import PairSettings, PairSource
from composer_mesh.plugins.frameworks.trl.parts import (
    BatchLayout,
    ChannelPart,
    Gathered,
    parts_of,
    view_tokens,
)
from composer_mesh.plugins.frameworks.trl.traces import (
    Traces,
    batch_sites,
    batch_traces,
    said_last,
    views_by_row,
)
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import hint_templates as templates_of
from composer_mesh.rollouts.traces import Trace


class ClosesPairs(TrainerCallback):
    """Closes a source of pairs at the end of training."""

    def __init__(self, pairs: PairSource) -> None:
        self._pairs = pairs

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._pairs.close()


try:
    from transformers.utils import get_json_schema
    from trl import GRPOTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed: pip install 'composer-mesh[trl]'", name=error.name
    ) from None

__all__ = ["ComposerGRPOTrainer", "PairLoss"]

PART, VIEWS = "composer_part", "composer_views"
STATE_FILE = "composer_state.json"


class ComposerGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with three channels; see docs/trl.md for what each needs of a run.

    Hints come from the error sites of rollouts: those of `TaskRollouts` and `TaskEnvironments`,
    and the failed calls of TRL's own tools and environments. The verified answer, which no hint may
    hold, is the environment's own or the column `answer`. `chat` renders hints and pairs, by
    default with the tokenizer's template; `hint_templates` add to those of `rollouts.hints`.
    `max_context` bounds hinted contexts and pairs; the model's own bound by default.
    """

    def __init__(
        self,
        *args: Any,
        sdpo: SdpoConfig | None = None,
        replay: PairLoss | None = None,
        pairs: PairSource | None = None,
        chat: ChatFormat | None = None,
        hint_templates: Mapping[str, str] | None = None,
        max_context: int | None = None,
        **options: Any,
    ) -> None:
        self._sdpo, self._replay = sdpo or SdpoConfig(), replay or PairLoss()
        check_channels(self._sdpo, self._replay, pairs)
        super().__init__(*args, **options)
        check_trainer(self)
        self._pair_source, self._templates = pairs, templates_of(hint_templates or {})
        text = self.model.config.get_text_config()
        self._longest = max_context or text.max_position_embeddings
        self._chat = chat or getattr(self.rollout_func, "chat", None) or self._own_chat()
        self._initial = self._frozen_copy()
        if self._on:
            learning_every_id(self.model)
            check_head(self.model)
        self._channels: FurtherChannels | None = None
        self._sdpo_channel: SdpoChannel | None = None
        self._planned: object = None
        self._completions: Sequence[Any] = ()
        self._figures: Figures = {}
        self._taid: Mapping[str, Any] | None = None
        if pairs is not None:
            self.add_callback(ClosesPairs(pairs))

    @property
    def _on(self) -> bool:
        return self._sdpo.on or self._replay.on

    def _own_chat(self) -> ChatFormat:
        """Return the format of the tokenizer's template, with TRL's tools and options for it."""
        tools = [get_json_schema(tool) for tool in self.tools] if self._on else []
        return ChatFormat(self._tokenizer, tools, options=dict(self.chat_template_kwargs))

    def _frozen_copy(self) -> Any:
        """Return a copy of the initial policy, if one is needed and adapters do not keep it."""
        needed = self._replay.needs_reference or (self._sdpo.on and self._sdpo.teacher == "frozen")
        if not needed or hasattr(self.model, "disable_adapter"):
            return None
        return copy.deepcopy(self.model).requires_grad_(False).eval()

    # Rollouts: hints and pairs of each generation batch.

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        self._completions = completions
        for environment, messages in zip(self.environments or (), completions, strict=False):
            text = said_last(messages) if isinstance(environment, TaskEnvironment) else None
            if text is not None:
                environment._say(text)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        if not (self._on and self.model.training):
            return found
        traces, layout = self._traces(inputs, found), self._layout()
        self._batch, views = Gathered(self.accelerator), list[HintedView]()
        if self._sdpo.on:
            limit = max(1, layout.share(self._sdpo.max_sites_per_step) // layout.ranks)
            sites = batch_sites(
                traces, self._sdpo, self._chat, self._templates, limit, self._longest
            )
            own = sum(len(trace.error_sites) for trace in traces if trace is not None)
            self._batch.add("rollouts/error_sites", own)
            self._batch.add("sdpo/sites", len(sites.views))
            self._batch.add("sdpo/refused_hints", sites.refused)
            views = sites.views
        found[VIEWS] = views_by_row(traces, views)
        self._new_pairs = self._pairs_for([one for one in traces if one is not None], layout)
        return found

    def _traces(self, inputs: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> Traces:
        name = f"{self.state.global_step:06d}-{self.accelerator.process_index}"
        tools = [tool.__name__ for tool in self.tools]
        return batch_traces(inputs, found, self._completions, self.environments, tools, name)

    def _pairs_for(self, traces: Sequence[Trace], layout: BatchLayout) -> list[PairSample]:
        """Return the pairs of a generation batch, the same on all ranks."""
        source = self._pair_source
        if source is None or not self._replay.on:
            return []
        step, share = self.state.global_step, layout.microbatches / layout.accumulated
        if not source.reads_rollouts:
            return source.pairs(step, share, ())[0]
        return self._batch.pairs(lambda every: source.pairs(step, share, every), traces)

    # Steps: the part of each microbatch, its losses and figures.

    def _layout(self) -> BatchLayout:
        args = self.args
        return BatchLayout(
            args.steps_per_generation,
            args.gradient_accumulation_steps,
            self.accelerator.num_processes,
        )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self._on and self.model.training:
            self._open()
        inputs = super()._prepare_inputs(generation_batch)
        buffered = self._buffered_inputs
        if self._on and self.model.training and self._planned is not buffered:
            rows = [batch.pop(VIEWS) for batch in buffered]
            tokens = self._batch.counts([view_tokens(one) for one in rows])
            rank = self.accelerator.process_index
            parts = parts_of(rows, tokens, self._new_pairs, self._layout(), rank)
            for batch, part in zip(buffered, parts, strict=True):
                batch[PART] = part
            self._planned = buffered
            self._log_batch(sum(map(sum, tokens)))
        return inputs

    def _log_batch(self, tokens: int) -> None:
        """Log what a generation batch has, as means over its optimizer steps."""
        found = self._batch.sums()
        if self._sdpo.on:
            found["sdpo/tokens"] = tokens
        if self._replay.on:
            found["replay/pairs"] = len(self._new_pairs)
        layout = self._layout()
        for name, value in found.items():
            self._metrics["train"][name].append(value * layout.accumulated / layout.microbatches)

    def _open(self) -> None:
        """Set up the channels before the first step, when the model is wrapped."""
        if self._channels is not None:
            return
        root = self.accelerator.unwrap_model(self.model_wrapped)
        sharded = is_sharded_by_fsdp2(root)
        if sharded:
            check_sharded(self, self._replay)
            share_forwards(root)
        if self._initial is not None:
            self._initial.to(self.accelerator.device)
        self._channels = FurtherChannels(
            self._sdpo,
            self._replay,
            reference=self._reference,
            autocast=self.accelerator.autocast,
            sharded=sharded,
        )
        self._captured = Captured(base_model(root))
        self._sdpo_channel = SdpoChannel(self._sdpo, self.state.max_steps)
        if self._taid is not None:
            self._sdpo_channel.taid.load_state_dict(dict(self._taid))
        source = self._pair_source
        if source is not None and (not source.reads_rollouts or self.accelerator.is_main_process):
            groups = self.args.generation_batch_size // self.num_generations
            folder = Path(self.args.output_dir) / "teacher_replay"
            source.open(PairSettings(self._chat, self._longest, groups, self.args.seed, folder))

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """Yield the frozen initial policy: the copy, or the base without its adapters."""
        if self._initial is not None:
            yield self._initial
            return
        root = self.accelerator.unwrap_model(self.model_wrapped)
        with root.disable_adapter():
            yield base_model(root)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        part: ChannelPart | None = inputs.get(PART) if isinstance(inputs, dict) else None
        if part is None or self._channels is None or self._sdpo_channel is None:
            policy: Tensor = super()._compute_loss(model, inputs)
            return policy
        with self._captured.open():
            policy = super()._compute_loss(model, inputs)
        base = base_model(self.accelerator.unwrap_model(model))
        own: Figures = {"loss/policy": float(policy.detach()) / self.accelerator.num_processes}
        extra = self._channels.loss(
            base, self._captured.take(), inputs, part, self._sdpo_channel, own
        )
        for name, value in own.items():
            self._figures[name] = self._figures.get(name, 0.0) + value
        if self.accelerator.sync_gradients:
            self._finish_step()
        # Gradients are averaged over ranks, and each rank's losses are parts of a sum.
        return policy + self.accelerator.num_processes * extra

    def _finish_step(self) -> None:
        """Log the figures of an optimizer step over all its microbatches and ranks."""
        assert self._sdpo_channel is not None
        found = Gathered(self.accelerator).summed(self._figures)
        self._figures = {}
        losses = {name.removeprefix("loss/"): one for name, one in found.items()}
        total = step_total(losses, own_weights(self._sdpo.alpha, self._replay.beta))
        taught = self._sdpo_channel.finish_step(
            found.get("loss/sdpo"), self.state.global_step, Ranks()
        )
        for name, value in {**found, **taught, "loss/total": total}.items():
            self._metrics["train"][name].append(value)

    # Checkpoints: TAID's position; pairs depend on the step alone, and paid answers are on disk.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._sdpo_channel is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial))
            path = folder / f"checkpoint-{self.state.global_step}" / STATE_FILE
            path.write_text(json.dumps({"taid": self._sdpo_channel.taid.state_dict()}))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / STATE_FILE).exists():
            self._taid = json.loads(path.read_text())["taid"]


ALIASES = {
    "loss/policy": "loss/grpo",
    "loss/sdpo": "loss/sdpo_kl",
    "loss/replay": "loss/trace_replay_dpo",
}
"""What the framework calls our figures; `loss/total` has one name."""


class ComposerReplicationTrainer(ComposerGRPOTrainer):
    """`ComposerGRPOTrainer` with the framework's weights and figures.

    Without `pairs` the replay channel is off, whatever `beta_replay` is.
    """

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.1,
        beta_replay: float = 0.05,
        pairs: PairSource | None = None,
        **options: Any,
    ) -> None:
        replay = WeightedPreferenceConfig(beta=0.0 if pairs is None else beta_replay)
        sdpo = SdpoConfig(alpha=alpha_sdpo)
        super().__init__(*args, sdpo=sdpo, replay=replay, pairs=pairs, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the figures by both names."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for own, theirs in ALIASES.items():
            if own in metrics:
                metrics[theirs] = list(metrics[own])
        super().log(logs, start_time)
