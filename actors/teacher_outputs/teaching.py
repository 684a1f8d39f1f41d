"""The teacher model: its weights, how they follow the trainer's, and its outputs.

Used both in a teacher's own process and inside the trainer (placement "inline"). It runs forwards
only.

Axes: N hinted response tokens, H hidden size, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.language_model import LanguageModel, logit_softcap
from composer_mesh.actors.models.lora import adapters_off, export_state
from composer_mesh.actors.models.optimizer_state import StoredOptimizerState, check_weights
from composer_mesh.actors.models.policy import empty_model, load_model
from composer_mesh.actors.models.sharding import distinct, local, own_weights, release
from composer_mesh.actors.models.tokenizer import difference, load_tokenizer
from composer_mesh.actors.teacher_outputs.messages import TeacherHead, make_teacher_output
from composer_mesh.configs.paths import TEACHER_KEY
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.configs.trainer import Sharing
from composer_mesh.losses.distillation import ema_update
from composer_mesh.mesh.progress import made_progress
from composer_mesh.planning.model_folder import OTHER_TOKENIZER, UnfitModelFolder
from composer_mesh.planning.model_refusals import CappedInterpolation
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.step_plan import teacher_groups

Blend = Callable[[Any, float], None]
"""Interpolates a model's weights towards those of a version by a rate; 1 copies them."""


class TeacherModel:
    """A teacher of one of five kinds; `version` is the trainer version last absorbed.

    live           the trainer's weights
    ema            theta <- (1 - rate) theta + rate trainer's, at each version
    frozen         the initial weights
    trust_region   logits (1 - rate) initial + rate trainer's
    model          the weights of another model, whose head is fitted to `vocabulary` ids

    With `follows`, `model` is the trainer's own object, which the trainer updates: it is only read,
    and where the teacher's weights differ from it, `copied` returns the model that holds them: of
    initial weights also `model` itself, whose adapters are off in the teacher's forwards.
    With `sharing`, what hinted contexts begin with is computed once. Raises `CappedInterpolation`.
    """

    def __init__(
        self,
        model: Any,
        config: SdpoConfig,
        budget: int,
        follows: bool = False,
        copied: Callable[[Any], Any] = copy.deepcopy,
        vocabulary: int | None = None,
        sharing: Sharing = "off",
    ) -> None:
        if config.teacher == "trust_region" and (cap := logit_softcap(model.config)):
            raise CappedInterpolation(type(model).__name__, cap)
        self.version, self._vocabulary, self._sharing = 0, vocabulary, sharing
        self._config, self._budget, self._follows = config, budget, follows
        moves_apart = follows and config.teacher != "live"
        has_two = config.teacher == "trust_region" or moves_apart
        own = copied(model) if has_two else None
        self._own = None if own is None or own is model else own.requires_grad_(False)
        self._in_base = own is model
        self._live = model if own is None or config.teacher == "trust_region" else own
        self._initial = own if config.teacher == "trust_region" else None
        self._head: TeacherHead | None = None
        self._moves = follows and self._live is model
        """Whether each update of the trainer moves the weights, also within a version."""

    @property
    def models(self) -> list[Any]:
        """All models that the teacher holds."""
        return [self._live] if self._initial is None else [self._live, self._initial]

    def absorb(self, version: int, blend: Blend) -> None:
        """Follow the trainer to a version.

        A moving average absorbs each version once; after a missed version it restarts from the new
        weights.
        """
        before, self.version = self.version, version
        self.release()
        kind = self._config.teacher
        if kind == "ema":
            if version != before:
                blend(self._live, self._config.ema_rate if version == before + 1 else 1.0)
        elif self._config.follows_trainer and not self._follows:
            blend(self._live, 1.0)

    def release(self) -> None:
        """Free the head, and what forwards gathered of weights that are not the trainer's."""
        self._head = None
        if self._own is not None:
            release(self._own)

    def average(self) -> dict[str, Tensor]:
        """Return a moving average's weights, which only the teacher has; else empty."""
        return distinct(own_weights(self._live)) if self._config.teacher == "ema" else {}

    @torch.no_grad()
    def restore(self, version: int, average: StoredOptimizerState) -> None:
        """Restore the moving average of a version.

        Raises `StateOfOtherWeights` if the stored average is another model's.
        """
        own = self.average()
        check_weights(own, average.shapes() if own else own)
        average.read(own)
        self.version, self._head = version, None

    @torch.no_grad()
    def teacher_output(
        self, views: Sequence[HintedView], choice: Tensor | None = None, forwards: int = 0
    ) -> dict[str, Tensor]:
        """Return the configured output for each target of the views, in their order."""
        states = self.states(views, forwards)
        targets = torch.tensor([target for view in views for target in view.targets])
        return make_teacher_output(
            self._config, states, self.head(), targets.to(states.device), choice
        )

    @torch.no_grad()
    def states(self, views: Sequence[HintedView], forwards: int = 0) -> Tensor:
        """Return the normed last hidden states [N, H] at the views' teacher rows, in their order.

        With trust_region, both models' states are concatenated to [N, 2 H]. Each model runs at
        least `forwards` forwards, so that a sharded model runs equally often on all ranks.
        """
        if self._moves:
            self._head = None
        *others, last = self.models
        how = (views, self._budget, forwards, self._sharing)
        parts = [hinted_states(model, *how) for model in others]
        with adapters_off(last) if self._in_base else nullcontext():
            parts.append(hinted_states(last, *how))
        return torch.cat(parts, dim=-1)

    @torch.no_grad()
    def head(self) -> TeacherHead:
        """Return the head for the last `states`; of a sharded model it is valid until `release`."""
        if self._head is None:
            self._head = self._make_head()
        return self._head

    def _make_head(self) -> TeacherHead:
        live = LanguageModel(self._live)
        if self._initial is None:
            head = TeacherHead.of(live)
            return head if self._vocabulary is None else head.fitted(self._vocabulary)
        initial, rate = LanguageModel(self._initial), self._config.ema_rate
        weight = torch.cat([rate * live.weight, (1 - rate) * initial.weight], dim=-1)
        if live.bias is None or initial.bias is None:
            return TeacherHead(weight, None)
        return TeacherHead(weight, torch.lerp(initial.bias, live.bias, rate))


def blend_from(source: Any) -> Blend:
    """Return a blend from a model in the same process, with its adapters merged."""

    def blend(model: Any, rate: float) -> None:
        own = {name: local(weight) for name, weight in model.named_parameters()}
        theirs = export_state(source)
        ema_update(own, {name: local(theirs[name]) for name in own}, rate)

    return blend


@torch.no_grad()
def hinted_states(
    model: Any,
    views: Sequence[HintedView],
    budget: int,
    forwards: int = 0,
    sharing: Sharing = "off",
) -> Tensor:
    """Return the normed last hidden states [N, H] at each view's teacher rows, in view order.

    The model runs at least `forwards` forwards. With `sharing`, what hinted contexts begin with is
    computed once.
    """
    language_model = LanguageModel(model, sharing=sharing)
    groups = teacher_groups(views, budget, sharing)
    rows: list[Tensor] = [torch.empty(0)] * len(views)
    for indices in groups:
        states = language_model.hidden([views[index].teacher_ids for index in indices])
        for row, index in enumerate(indices):
            own = states.rows(states.places_of(row, views[index].teacher_rows))
            rows[index] = own.whole(own.states)
        made_progress(f"{len(indices)} hinted contexts")
    for _ in range(forwards - language_model.forwards):
        language_model.dummy_forward()
    return torch.cat(rows) if rows else torch.empty(0)


def check_teacher_tokenizer(config: SdpoConfig, policy: Path) -> None:
    """Raise `UnfitModelFolder` where the teacher's tokenizer is not that of the policy's folder.

    Another model must have the policy's, as the teacher reads the student's token ids.
    """
    if (other := config.teacher_model) is None:
        return
    if why := difference(load_tokenizer(policy), load_tokenizer(other.folder)):
        why = f"has another tokenizer, which {why}"
        raise UnfitModelFolder(str(other.folder), why, OTHER_TOKENIZER, TEACHER_KEY)


def load_teacher(config: SdpoConfig, policy: Path) -> Any:
    """Load the teacher's initial weights.

    Raises `UnfitModelFolder`, and `UnsupportedHead` for a head that the losses do not know.
    """
    if config.teacher_model is None:
        return load_model(policy)
    check_teacher_tokenizer(config, policy)
    try:
        model = load_model(config.teacher_model.folder)
    except UnfitModelFolder as error:
        raise error.at(TEACHER_KEY) from error
    LanguageModel(model).check_head()
    LanguageModel(model).check_rows()
    return model


def teacher_vocabulary(config: SdpoConfig, policy: Path) -> int | None:
    """Return the rows of the policy's head, to which another model's is fitted; else None."""
    if config.teacher_model is None:
        return None
    return len(empty_model(policy).get_output_embeddings().weight)
