"""The SDPO and the replay loss of one microbatch of TRL, on hidden states that TRL has computed.

The losses are those of the trainer of this project (`actors.learning`), with their options. A
microbatch has one forward of the policy, TRL's own, of which `Captured` keeps the hidden states;
one more for the pairs, and one without gradients for the hinted contexts.

Axes: B rows, T their padded length, N hinted tokens, H hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.replay_channel import ReplayChannel, answer_logprobs
from composer_mesh.actors.learning.sdpo_channel import SdpoChannel, StudentRows
from composer_mesh.actors.learning.update_pass import answer_sequences
from composer_mesh.actors.models.hidden_states import SelectedRows
from composer_mesh.actors.models.language_model import (
    STATES,
    LanguageModel,
    decoder_of,
    decoder_states,
    logit_scale,
)
from composer_mesh.actors.models.sharding import is_dtensor
from composer_mesh.actors.teacher_outputs.messages import (
    TeacherHead,
    TeacherOutput,
    make_teacher_output,
)
from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.channels.replay import figures_of
from composer_mesh.channels.step import Term, own_weights, step_loss
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.parts import ChannelPart
from composer_mesh.rollouts.batches import PairSample

Figures = dict[str, float]
Inputs = Mapping[str, Any]
UNBOUNDED = 1 << 62
"""Budget of tokens with which all hinted contexts of a microbatch share one forward."""


class Captured:
    """The last hidden states [B, T, H] of a model's forward, kept while the context is open."""

    def __init__(self, model: Any) -> None:
        self._model, self._states = model, list[Tensor]()

    @contextmanager
    def open(self) -> Iterator[Captured]:
        """Keep the states of the forwards inside."""
        self._states.clear()
        handle = decoder_of(self._model).register_forward_hook(self._keep)
        try:
            yield self
        finally:
            handle.remove()

    def _keep(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._states.append(output.last_hidden_state)

    def take(self) -> Tensor:
        """Return the states of the only forward; raises RuntimeError for another number of them."""
        if len(self._states) != 1:
            raise RuntimeError(
                f"TRL has computed the loss of a microbatch in {len(self._states)} forwards, but "
                "one is expected: use TRL 1.16"
            )
        scale = logit_scale(self._model.config)
        states = self._states.pop()
        return states if scale == 1.0 else states * scale


def base_model(model: Any) -> Any:
    """Return the causal LM inside of PEFT's wrapper, with the adapters in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def share_forwards(root: Any) -> None:
    """Let the decoder of a model sharded by FSDP2 be called alone, and keep its head gathered.

    All ranks must then call it equally often, in the same order.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    base = base_model(root)

    def states(_root: Any, **inputs: Any) -> Tensor:
        return decoder_states(base, **inputs)

    setattr(root, STATES, MethodType(states, root))
    register_fsdp_forward_method(root, STATES)
    if base is not root:
        setattr(base, STATES, getattr(root, STATES))
    root.set_reshard_after_forward(False, recurse=False)


class FurtherChannels:
    """Computes both losses; `reference` returns the frozen initial policy for a while.

    With `sharded`, every rank runs the forwards that any rank needs.
    """

    def __init__(
        self,
        sdpo: SdpoConfig,
        replay: WeightedPreferenceConfig,
        *,
        reference: Callable[[], AbstractContextManager[Any]],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        sharded: bool = False,
    ) -> None:
        self.sdpo, self.replay = sdpo, replay
        self._reference, self._autocast, self._sharded = reference, autocast, sharded
        self._pairs = ReplayChannel(replay)
        self._scores: dict[str, tuple[float, float]] = {}

    def loss(
        self,
        model: Any,
        hidden: Tensor,
        inputs: Inputs,
        part: ChannelPart,
        channel: SdpoChannel,
        figures: Figures,
    ) -> Tensor:
        """Return alpha * SDPO + beta * replay of a microbatch, each over its own divisor.

        `hidden` [B, T, H] are the states of TRL's forward of `inputs`. Adds `loss/sdpo` and
        `loss/replay`, unweighted, and the channels' other figures, where this rank has data.
        """
        terms: dict[str, Term] = {}
        own = {"sdpo": any(part.rows), "replay": bool(part.pairs)}
        if self.sdpo.on and self._takes_part(own["sdpo"], part.any_rank_has_views):
            terms["sdpo"] = partial(self._distil, model, hidden, inputs, part, channel, figures)
        if self.replay.on and self._takes_part(own["replay"], part.any_rank_has_pairs):
            terms["replay"] = partial(self._prefer, model, part, figures)
        found = step_loss(terms, own_weights(self.sdpo.alpha, self.replay.beta))
        losses = {name: float(loss) for name, loss in found.losses.items() if own[name]}
        _add(figures, {f"loss/{name}": loss for name, loss in losses.items()})
        figures.update(
            {name: float(one) for name, one in figures.items()}
        )  # channels leave tensors
        return found.total()

    def _takes_part(self, has_some: bool, any_rank_has_some: bool) -> bool:
        return any_rank_has_some if self._sharded else has_some

    def _distil(
        self,
        model: Any,
        hidden: Tensor,
        inputs: Inputs,
        part: ChannelPart,
        channel: SdpoChannel,
        figures: Figures,
    ) -> Tensor:
        student = LanguageModel(model)
        views = [view for views in part.rows for view in views]
        if not views:  # another rank has some, whose forward of a live teacher needs this one
            if self.sdpo.teacher == "live":
                with torch.no_grad(), evaluating(model), self._autocast():
                    student.dummy_forward()
            return hidden.sum() * 0
        lengths = inputs["prompt_mask"].sum(-1).tolist()
        width = inputs["prompt_ids"].shape[1]
        states = [
            hidden[row, [width - lengths[row] + at for at in view.student_rows]]
            for row, views in enumerate(part.rows)
            for view in views
        ]
        targets = torch.tensor([target for view in views for target in view.targets])
        own = torch.cat(states).to(student.weight.dtype)
        rows = StudentRows(
            student, SelectedRows.all(own), targets.to(hidden.device), self.sdpo.temperature
        )
        output = self._teacher_output(model, rows, part)
        own_figures: Figures = defaultdict(float)
        with torch.autocast(hidden.device.type, enabled=False):
            # The channel divides by whole numbers alone; a part of a step is no whole one.
            loss = channel.loss(rows, output, 1, own_figures) / part.sdpo_tokens
        _add(figures, {name: value / part.sdpo_tokens for name, value in own_figures.items()})
        return loss

    @torch.no_grad()
    def _teacher_output(self, model: Any, rows: StudentRows, part: ChannelPart) -> TeacherOutput:
        """Return what the configured teacher says to the views of a microbatch."""
        views = [view for views in part.rows for view in views]
        with self._teacher(model) as teacher:
            with evaluating(teacher), self._autocast():
                states = hinted_states(teacher, views, UNBOUNDED, 1 if self._sharded else 0)
            head = TeacherHead.of(LanguageModel(teacher))
            states = states.to(head.weight.dtype)
            by_student = self.sdpo.teacher_output == "topk" and self.sdpo.top_k_choice == "student"
            choice = rows.top_k(self.sdpo.top_k) if by_student else None
            tensors = make_teacher_output(self.sdpo, states, head, rows.targets, choice)
            return TeacherOutput(tensors, head)

    def _teacher(self, model: Any) -> AbstractContextManager[Any]:
        return self._reference() if self.sdpo.teacher == "frozen" else nullcontext(model)

    def _prefer(self, model: Any, part: ChannelPart, figures: Figures) -> Tensor:
        student = LanguageModel(model)
        if not part.pairs:  # another rank has some
            with self._autocast():
                return student.dummy_forward()
        pairs = self._scored(part.pairs)
        with self._autocast():
            states = student.hidden(answer_sequences(pairs))
        with torch.autocast(states.computed.device.type, enabled=False):
            states = replace(states, computed=states.computed.to(student.weight.dtype))
            result = self._pairs.loss(student, pairs, 1, states)
        share = 1 / part.pair_count
        found = figures_of(result)
        _add(figures, {f"replay/{name}": value * share for name, value in found.items()})
        return result.loss * share

    def _scored(self, pairs: Sequence[PairSample]) -> list[PairSample]:
        """Return the pairs with the log-probs of the frozen initial policy, computed once."""
        if not self.replay.needs_reference:
            return list(pairs)
        missing = [
            pair for pair in pairs if pair.reference is None and pair.pair_id not in self._scores
        ]
        if missing:
            with torch.no_grad(), self._reference() as model, evaluating(model), self._autocast():
                for pair in missing:  # each alone, so that a resumed run rounds as the first one
                    found = answer_logprobs(LanguageModel(model), [pair], self.replay.ld_alpha)
                    chosen, rejected = (float(side) for side in found)
                    self._scores[pair.pair_id] = chosen, rejected
        return [replace(one, reference=one.reference or self._scores[one.pair_id]) for one in pairs]


def _add(figures: Figures, found: Mapping[str, float]) -> None:
    for name, value in found.items():
        figures[name] = figures.get(name, 0.0) + value


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model and all of its parts in evaluation mode for a while."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def is_sharded_by_fsdp2(model: Any) -> bool:
    """Whether a model's weights are sharded by FSDP2."""
    return any(is_dtensor(weights) for weights in model.parameters())
