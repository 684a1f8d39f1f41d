"""The names of the composer-replication framework, on the functions of this project.

    from composer_mesh.plugins.frameworks.composer_replication import compose_loss, replay_trace

Names, arguments and defaults are the framework's; what is computed is ours, without its known
errors. docs/composer-replication.md has the table of what differs. `ComposerReplicationTrainer`
needs the extra `trl`; everything else needs none.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer_mesh.configs.replay import DEFAULT_FILTERS, FilterConfig
from composer_mesh.losses.distillation import TaidSchedule
from composer_mesh.losses.distillation import taid_loss as summed_taid_loss
from composer_mesh.plugins.frameworks import harness
from composer_mesh.rollouts.consensus import decide
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import PreferencePair, StudentState, TeacherAnswer, TeacherReply
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.offline import api
from composer_mesh.services.offline.options import ReplayRefused

if TYPE_CHECKING:
    from composer_mesh.plugins.frameworks.trl.trainer import ComposerReplicationTrainer

__all__ = [
    "DEFAULT_TEACHERS",
    "ComposeLossResult",
    "ComposerReplicationTrainer",
    "DJNormalizer",
    "DPOPair",
    "NormalizedDPOPair",
    "TAIDScheduler",
    "TraceState",
    "compose_loss",
    "extract_dpo_pairs",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
    "replay_trace",
    "taid_loss",
]

DEFAULT_TEACHERS: tuple[str, ...] = ()
"""None: models of providers come and go, and each costs money. Name them."""


@dataclass(frozen=True)
class ComposeLossResult:
    """The total, and each channel's own loss: detached and unweighted, None if it is off.

    `off` says why.
    """

    total: Tensor
    lm_ce: Tensor | None
    sdpo_jsd: Tensor | None
    trace_replay_dpo: Tensor | None
    off: dict[str, str] = field(default_factory=dict)


def compose_loss(
    model: Any,
    batch: Mapping[str, Tensor | None],
    alpha_sdpo: float = 0.1,
    beta_replay: float = 0.05,
    dpo_variant: str = "dpo",
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    sdpo_wrapper: str = "none",
    taid_t: float | None = None,
    entropy_opd_h_max: float | None = None,
) -> ComposeLossResult:
    """Cross-entropy + alpha_sdpo * JSD at hinted tokens + beta_replay * preference loss.

    The batch has the framework's keys, as `harness.compose_loss` describes them; a channel whose
    weight is 0, or whose keys are missing, None or empty, is off. `simpo_gamma` is the framework's
    1.0, where the paper has 0.5.
    """
    kept = {key: _mask(key, one) for key, one in batch.items() if one is not None and one.numel()}
    named: dict[str, Any] = {"sdpo_wrapper": sdpo_wrapper, "dpo_variant": dpo_variant}
    found = harness.compose_loss(
        model,
        kept,
        **named,
        alpha_sdpo=alpha_sdpo,
        beta_replay=beta_replay,
        taid_t=taid_t,
        entropy_opd_h_max=entropy_opd_h_max,
        simpo_beta=simpo_beta,
        simpo_gamma=simpo_gamma,
    )
    off = {"trace_replay_dpo" if name == "replay" else name: why for name, why in found.off.items()}
    return ComposeLossResult(found.total, found.lm_ce, found.sdpo_jsd, found.replay, off)


def _mask(key: str, values: Tensor) -> Tensor:
    """Return masks of floats, which the framework has, as integers; everything else as it is."""
    if not (key.endswith("_mask") and values.is_floating_point()):
        return values
    if not torch.isin(values, values.new_tensor([0.0, 1.0])).all():
        raise ValueError(f"{key} has other values than 0 and 1: pass a mask, not weights")
    return values.long()


def taid_loss(student: Tensor, teacher: Tensor, mask: Tensor, t: float) -> Tensor:
    """TAID's cross-entropy to the target between student and teacher, a mean over the mask.

    `student` and `teacher` are logits [B, T, V], `mask` [B, T] has 1 where tokens count.
    """
    kept = _mask("taid_mask", mask).bool()
    return summed_taid_loss(student, teacher, kept, t=t, normalizer=max(1, int(kept.sum())))


class TAIDScheduler:
    """TAID's position `t`, which a falling loss moves faster."""

    def __init__(
        self,
        num_train_steps: int,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,
    ) -> None:
        self._schedule = TaidSchedule(t_start, t_end, alpha, beta, not disable_adaptive)
        self._steps = num_train_steps

    @property
    def t(self) -> float:
        """The position that the next loss is computed with."""
        return self._schedule.t

    def update_t(self, loss: Tensor | float, global_step: int) -> float:
        """Move `t` after a step with this loss, and return it."""
        return self._schedule.update(float(loss), global_step, self._steps)


@dataclass(frozen=True)
class TraceState:
    """A conversation before an assistant's turn, and what the student did there."""

    state_id: str
    messages: list[Message]
    student_action: str | Message

    def state(self) -> StudentState:
        return api.chat_state(self.state_id, self.messages, self.student_action)


@dataclass(frozen=True)
class DPOPair:
    """The teachers' action preferred to the student's, as texts."""

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int


@dataclass(frozen=True)
class NormalizedDPOPair(DPOPair):
    """A pair that has passed the filters, also as lists of one message."""

    chosen_messages: list[Message]
    rejected_messages: list[Message]

    def row(self) -> dict[str, Any]:
        """Return the pair as TRL's DPOTrainer takes it."""
        sides = {"chosen": self.chosen_messages, "rejected": self.rejected_messages}
        return {"prompt": self.state_messages, **sides}


TeacherActions = Mapping[str, Sequence[TeacherReply] | Mapping[str, str]]
"""By state: the replies of `replay_trace`, or the texts of actions by teacher."""


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[api.Teacher] = DEFAULT_TEACHERS,
    max_total_usd: float = 10.0,
    **options: Any,
) -> dict[str, list[TeacherReply]]:
    """Ask all teachers about each state; `max_total_usd` is never passed.

    `options` are those of `services.offline.api.replay_trace`: `tools`, `folder` and others. Raises
    ReplayRefused without teachers.
    """
    if not teachers:
        raise ReplayRefused(
            "no teachers are named, and there are no default ones: pass OpenRouter ids, as "
            "['vendor/model', …], or tables as in [[replay.teachers]]"
        )
    own = [state.state() for state in states]
    return await api.replay_trace(own, teachers, max_total_usd, **options)


def extract_dpo_pairs(
    states: Sequence[TraceState], teacher_actions: TeacherActions, agreement_threshold: int = 2
) -> list[DPOPair]:
    """Return a pair for each state where enough teachers agree, and not with the student."""
    pairs = []
    for state in states:
        if state.state_id not in teacher_actions:
            raise ValueError(
                f"teacher_actions has nothing for state {state.state_id!r}: pass what replay_trace "
                "returned for the same states"
            )
        replies = _replies(teacher_actions[state.state_id])
        found = decide(state.state(), replies, agreement_threshold).pair
        if found is not None:
            pairs.append(
                DPOPair(
                    state.state_id,
                    state.messages,
                    found.chosen_text,
                    found.rejected_text,
                    len(found.teachers),
                )
            )
    return pairs


def _replies(said: Sequence[TeacherReply] | Mapping[str, str]) -> Sequence[TeacherReply]:
    if not isinstance(said, Mapping):
        return said
    return [
        TeacherAnswer(teacher, text, assistant_message(text, "call"), 0.0, False, 0.0)
        for teacher, text in said.items()
    ]


class DJNormalizer:
    """The quality filters, on both sides of each pair; `dropped` counts by filter.

    Without `filters`: 8 to 32,000 characters, 2 to 4,096 words, at most half special characters, no
    duplicates. One object remembers what it has seen.
    """

    def __init__(self, filters: Sequence[FilterConfig] = DEFAULT_FILTERS) -> None:
        self._filters = PairFilters(filters)
        self.dropped: dict[str, int] = {}

    def normalize(self, pairs: Sequence[DPOPair]) -> list[NormalizedDPOPair]:
        """Return the pairs that pass, in order."""
        found = self._filters.keep([_preference(pair) for pair in pairs])
        for name, count in found.dropped.items():
            self.dropped[name] = self.dropped.get(name, 0) + count
        return [
            NormalizedDPOPair(
                one.state_id,
                one.messages,
                one.chosen_text,
                one.rejected_text,
                len(one.teachers),
                [one.chosen_message],
                [one.rejected_message],
            )
            for one in found.kept
        ]


def _preference(pair: DPOPair) -> PreferencePair:
    sides = (pair.chosen, pair.rejected)
    chosen, rejected = (assistant_message(text, "call") for text in sides)
    return PreferencePair(
        pair_id=pair.state_id,
        state_id=pair.state_id,
        trace_id="",
        turn=0,
        messages=pair.state_messages,
        context_ids=[],
        chosen_text=pair.chosen,
        chosen_message=chosen,
        rejected_text=pair.rejected,
        rejected_message=rejected,
        rejected_ids=[],
        rejected_version=0,
        teachers=[""] * pair.n_teachers_agreeing,
        votes=pair.n_teachers_agreeing,
        asked=pair.n_teachers_agreeing,
        usd=0.0,
        usd_known=False,
    )


async def replay_and_normalize_trace(
    states: Sequence[TraceState],
    teachers: Sequence[api.Teacher] = DEFAULT_TEACHERS,
    agreement_threshold: int = 2,
    max_total_usd: float = 10.0,
    **options: Any,
) -> list[NormalizedDPOPair]:
    """Ask, vote and filter in one call."""
    replies = await replay_trace(states, teachers, max_total_usd, **options)
    return DJNormalizer().normalize(extract_dpo_pairs(states, replies, agreement_threshold))


def replay_and_normalize_trace_sync(*args: Any, **options: Any) -> list[NormalizedDPOPair]:
    """`replay_and_normalize_trace` for code without an event loop."""

    def work() -> Coroutine[Any, Any, list[NormalizedDPOPair]]:
        return replay_and_normalize_trace(*args, **options)

    return api.run_blocking(work, "replay_and_normalize_trace")


def __getattr__(name: str) -> Any:
    if name == "ComposerReplicationTrainer":
        from composer_mesh.plugins.frameworks.trl import trainer

        return trainer.ComposerReplicationTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
