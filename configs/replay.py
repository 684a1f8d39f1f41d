"""The replay channel: which teachers are asked, and when their answers make a pair."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section, Share
from composer_mesh.configs.endpoint import ChatEndpoint


class TeacherConfig(ChatEndpoint):
    """One external teacher that speaks the OpenAI chat protocol."""

    name: Annotated[str, Field(min_length=1)]
    """How reports call this teacher; unique in the run."""

    error_rate: Share | None = None
    """Share of a builtin teacher's actions that are wrong on purpose; 0 when not set."""

    @model_validator(mode="after")
    def _errors_are_a_builtin_teachers(self) -> Self:
        if self.kind == "openai":
            self._refuse(("error_rate",))
        return self


class ReplayConfig(Section):
    """Preference pairs from teachers that agree with each other against the student."""

    beta: NotNegative = 0.0
    """Weight of the replay loss in the total; 0 turns the channel off."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """The preference loss; simpo needs no reference policy, so none is loaded for it."""

    dpo_beta: Positive = 0.1
    """Strength of the pull of dpo and ipo towards the frozen reference policy."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Chance that a pair is the wrong way round (dpo, simpo)."""

    simpo_beta: Positive = 2.0
    """Scale of simpo's difference of average log-probs."""

    simpo_gamma: NotNegative = 0.5
    """Margin that simpo asks for: the authors' ratio of 0.25 times simpo_beta."""

    actors: Count = 2
    """Teacher-replay actors that ask in parallel."""

    ask: Count = 3
    """Teachers that are asked about one frozen state."""

    agreement_threshold: Annotated[int, Field(ge=2)] = 2
    """Teachers that must give the same action before it counts as the chosen one."""

    states_per_step: Count = 16
    """Frozen states that are sent to the teachers for one optimizer step."""

    timeout_s: Positive = 30.0
    """Seconds until a teacher's answer no longer counts."""

    teachers: Annotated[tuple[TeacherConfig, ...], Field(strict=False)] = ()
    """The teachers, in the order in which they are asked."""

    @model_validator(mode="after")
    def _smoothing_has_an_effect(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing > 0:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing} but loss is 'ipo', which has none: "
                "remove it, or set loss to 'dpo' or 'simpo'"
            )
        return self

    @model_validator(mode="after")
    def _a_pair_is_possible(self) -> Self:
        if self.agreement_threshold > self.ask:
            raise ValueError(
                f"agreement_threshold is {self.agreement_threshold} but ask is {self.ask}, so no "
                "answer can ever win: raise ask or lower agreement_threshold"
            )
        if self.beta > 0 and self.ask > len(self.teachers):
            raise ValueError(
                f"ask is {self.ask} but there are {len(self.teachers)} teachers, so no state can "
                "be sent to enough of them: add [[replay.teachers]] or lower ask, or set beta to 0"
            )
        names = [teacher.name for teacher in self.teachers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"teachers has {names.count(name)} entries named {name!r} but names must be "
                    "unique, because reports are by name: rename all but one"
                )
        return self

    @property
    def on(self) -> bool:
        """Whether the channel takes part in the run."""
        return self.beta > 0

    @property
    def has_builtin_teachers(self) -> bool:
        """Whether the run itself must serve experts."""
        return any(teacher.kind == "builtin" for teacher in self.teachers)
