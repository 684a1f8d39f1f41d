"""The SDPO channel: distillation at error sites from a teacher that sees a hint.

The teacher is the trained model itself, or another model with the same tokenizer.

Hints for the SDPO teacher: sources, writer and length limits.

Contains no credentials: `api_key_env` names an environment variable.
"""

from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from composer_mesh.configs.base import (
    MOST_ENTRIES,
    Concurrent,
    Cores,
    Count,
    CountOrZero,
    Dollars,
    FilePath,
    NotNegative,
    Number,
    Positive,
    Processes,
    Seconds,
    Section,
    Share,
    TemperatureAboveZero,
    Tokens,
    repeated,
)
from composer_mesh.configs.channels import ChannelSchedule, ChannelSection
from composer_mesh.configs.hub import ModelPath, ModelSource
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.teachers import ChatEndpoint

HintSource = Literal["error", "sibling", "feedback"]


def checked_template(template: str) -> str:
    """Return the template; raise ValueError if a placeholder is not a plain field name.

    `{tool}` is one; `{tool.name}`, `{tool!r}`, `{tool:>9}` and `{}` are not.
    """
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"template is {template!r} but its braces do not close ({error}): write each field as "
            "{name}, and a brace itself as {{ or }}"
        ) from None
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ValueError(
                f"template is {template!r} but its placeholder {name!r} is not a plain field name: "
                "write {name}, without index, attribute or format"
            )
    return template


Template = Annotated[str, Field(min_length=1), AfterValidator(checked_template)]


class HintWriterConfig(ChatEndpoint):
    """The model that writes the hints of the error source."""

    timeout_s: Seconds = 10.0
    """Seconds that a group waits for all its hints; templates replace missing ones."""

    max_concurrent: Concurrent = 8
    """Maximum number of concurrent requests."""

    budget_requests: Count = 1000
    """Maximum number of requests in the run; cached hints need none."""

    budget_usd: Dollars = 1.0
    """Maximum dollars in the run; 0 allows free answers only."""

    assumed_usd: Dollars = 0.001
    """Dollars reserved for a request in flight if the provider lists no price, or more once a
    request has cost more. They are charged if the provider reports no cost."""

    cache: FilePath | None = None
    """SQLite cache of answers, shared by runs; hints.sqlite in the run directory if not set."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.assumed_usd > self.budget_usd:
            yield (
                f"assumed_usd is {self.assumed_usd} but budget_usd is {self.budget_usd}, so no "
                "request may ever be sent: raise budget_usd or lower assumed_usd"
            )


class HintsConfig(Section):
    """Hints that the teacher sees and the student does not."""

    sources: Annotated[tuple[HintSource, ...], Field(strict=False, min_length=1, max_length=3)] = (
        "error",
    )
    """Sources of hints in order of preference. "error": what was wrong with the action; "sibling":
    what a successful rollout of the same prompt did before its answer; "feedback": the
    environment's response to the action."""

    max_tokens: Tokens = 256
    """Maximum tokens of a hint; a longer one is truncated and counted."""

    templates: dict[str, Template] = Field(default_factory=dict, max_length=MOST_ENTRIES)
    """Templates by hint_template_key, added to the built-in ones or replacing them; {field} is
    replaced by a field of the error's data."""

    writer: Literal["template", "llm"] = "template"
    """Writer of the error source's hints. "template": the template alone; "llm": a model over the
    OpenAI chat protocol, with the template as fallback."""

    llm: HintWriterConfig | None = None
    """The model for writer = "llm"."""

    def _problems(self) -> Iterator[str]:
        for source in repeated(self.sources):
            yield (
                f"sources is {list(self.sources)} but its order is a preference, in which "
                f"{source!r} can stand once: remove the later one"
            )
        if self.writer == "llm" and self.llm is None:
            yield (
                "writer is 'llm' but llm is not set, so nobody can be queried: add a table "
                "[sdpo.hints.llm] with kind, or set writer to 'template'"
            )
        if self.writer == "llm" and "error" not in self.sources:
            yield (
                f"writer is 'llm' but sources is {list(self.sources)}, and an llm words only "
                "hints of the source 'error': add 'error' to sources or set writer to 'template'"
            )

    @property
    def active_writer(self) -> HintWriterConfig | None:
        """The configured hint writer; None if only templates are used."""
        return self.llm if self.writer == "llm" else None

    @property
    def has_builtin_writer(self) -> bool:
        """Whether the run itself serves the hint writer."""
        return self.active_writer is not None and self.active_writer.kind == "builtin"


Sites = Literal["all", "first", "surprise"]
RightAction = Literal["success", "no_error"]

FIXED = ("frozen", "model")
"""Teachers whose weights never change."""


class TeacherModelConfig(ModelSource):
    """Another model with the policy's tokenizer, as the teacher."""

    path: ModelPath
    """As `policy.path`; its tokenizer must be the policy's."""

    sizes: ModelSizes | None = None
    """Sizes of the model in path, as in its config.json, so that `check` can estimate memory before
    the folder exists. They are validated against the folder once it does."""

    @property
    def folder(self) -> Path:
        """Where the model is."""
        return self.folder_of(self.path)


class SitesConfig(Section):
    """Error sites that are hinted, and right actions at which the hinted teacher is compared."""

    sites: Sites = "all"
    """Order of the error sites of a step. "all": round-robin over the rollouts; "first": only the
    earliest of each rollout; "surprise": those first whose sampled tokens were least likely."""

    advantage_sites: CountOrZero = 0
    """Maximum number of right actions per optimizer step at which the hinted teacher is compared
    with the student, for sdpo/advantage_over_student; 0 compares none."""

    right_action: RightAction = "success"
    """Which action of a sibling in the same context counts as right. "success": one without error
    in a rollout that succeeded; "no_error": any one without error."""


class SdpoConfig(SitesConfig, ChannelSection):
    """Distillation at error sites from a teacher that sees a hint."""

    weight_key: ClassVar[str] = "alpha"

    advantage_sites: CountOrZero = 4
    """As above; 4 unless set, and 0 where actions cannot be compared: with teacher_output "topk" or
    trainer.context_parallel."""

    alpha: NotNegative = 0.0
    """Weight of the SDPO loss in the total; 0 turns the channel off."""

    alpha_schedule: ChannelSchedule = Field(default_factory=ChannelSchedule)
    """How alpha changes over the run; alpha is its peak."""

    min_advantage: Number | None = None
    """Running mean of sdpo/advantage_over_student, in nats, below which a step trains without the
    channel; not set always trains it. Needs advantage_sites."""

    min_advantage_wins: Share | None = None
    """Running mean of sdpo/advantage_wins below which a step trains without the channel. It is like
    min_advantage, but all actions count the same, also those at which the teacher is far worse."""

    objective: Literal["none", "taid", "entropy_opd"] = "none"
    """"none": the generalized JSD; "taid": a target that moves from student to teacher over the
    run; "entropy_opd": forward KL where the teacher's entropy is high, else reverse KL."""

    jsd_beta: Share = 0.5
    """Mixture weight of the generalized Jensen-Shannon divergence."""

    temperature: TemperatureAboveZero = 1.0
    """Temperature of both distributions in the divergence."""

    entropy_opd_h_max: Positive | None = None
    """Teacher entropy in nats above which entropy_opd is forward KL; log of the vocabulary size
    when not set."""

    teacher_output: Literal["hidden", "topk", "full", "sampled"] = "hidden"
    """Teacher output per token. "hidden": the last hidden state, exact and small; "topk": log-probs
    of top_k entries; "full": all logits; "sampled": the log-prob of the sampled token."""

    top_k: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Number of entries per token in a topk output; the rest is one tail bucket."""

    top_k_choice: Literal["teacher", "student"] = "teacher"
    """Model whose most likely entries a topk output holds. "student" queries again after the
    student's forward."""

    teacher: Literal["live", "ema", "frozen", "trust_region", "model"] = "live"
    """Weights of the teacher. "live": the trainer's; "ema": their moving average; "frozen": the
    initial ones; "trust_region": interpolated logits of the initial and the trainer's weights;
    "model": those of another model, in teacher_model."""

    teacher_model: TeacherModelConfig | None = None
    """The other model of teacher "model"."""

    ema_rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Step of the ema towards the trainer's weights at each version; for trust_region, the
    interpolation factor from the initial logits to the trainer's."""

    placement: Literal["mesh", "inline"] = "mesh"
    """"mesh": teachers have their own processes; "inline": the trainer runs their forward."""

    replicas: Processes = 1
    """Number of SDPO teacher actors that share the tokens of a step."""

    when_lost: Literal["skip", "wait"] = "skip"
    """Behaviour of a step when a teacher dies: "skip" trains it without the channel, "wait" waits
    for the replacement."""

    max_sites_per_step: Concurrent = 32
    """Maximum number of error sites shown to the teacher per optimizer step."""

    threads: Cores = 1
    """CPU threads of each SDPO teacher."""

    hints: HintsConfig = Field(default_factory=HintsConfig)
    """Hints that are shown to the teacher."""

    @model_validator(mode="before")
    @classmethod
    def _not_compared_by_default_with_topk(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("teacher_output") == "topk":
            return {"advantage_sites": 0, **given}
        return given

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.objective != "none" and self.teacher_output not in ("hidden", "full"):
            yield (
                f"objective is {self.objective!r} but teacher_output is {self.teacher_output!r}, "
                "and it needs the teacher's whole distribution: "
                "set teacher_output to 'hidden' or 'full'"
            )
        if self.entropy_opd_h_max is not None and self.objective != "entropy_opd":
            yield (
                f"entropy_opd_h_max is {self.entropy_opd_h_max} but objective is "
                f"{self.objective!r}, which does not read it: "
                "remove it or set objective to 'entropy_opd'"
            )
        if self.placement == "inline" and self.replicas > 1:
            yield (
                f"replicas is {self.replicas} but placement is 'inline', where the trainer is its "
                "own teacher: set placement to 'mesh' or replicas to 1"
            )
        for name in ("min_advantage", "min_advantage_wins"):
            least = getattr(self, name)
            if least is not None and self.advantage_sites == 0:
                yield (
                    f"{name} is {least} but advantage_sites is 0, so no advantage is ever "
                    f"measured: set advantage_sites to 1 or more, or remove {name}"
                )
        if self.advantage_sites and self.teacher_output == "topk":
            yield (
                f"advantage_sites is {self.advantage_sites} but teacher_output is 'topk', which "
                "lacks the log-probs of right actions that are not among its entries: set "
                "teacher_output to 'hidden', 'full' or 'sampled', or advantage_sites to 0"
            )
        if self.teacher == "model" and self.teacher_model is None:
            yield (
                "teacher is 'model' but teacher_model is not set: set teacher_model.path to the "
                "folder of a model with the policy's tokenizer"
            )
        if self.teacher != "model" and self.teacher_model is not None:
            yield (
                f"teacher_model.path is {str(self.teacher_model.path)!r} but teacher is "
                f"{self.teacher!r}, which does not read it: set teacher to 'model', or remove "
                "teacher_model"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the channel trains only while the hinted teacher is the better one."""
        return self.min_advantage is not None or self.min_advantage_wins is not None

    @property
    def has_own_actors(self) -> bool:
        """Whether teachers run in their own processes."""
        return self.on and self.placement == "mesh"

    @property
    def follows_trainer(self) -> bool:
        """Whether the teacher's weights depend on versions after the initial one."""
        return self.teacher not in FIXED

    @property
    def keeps_initial(self) -> bool:
        """Whether the teacher needs the weights that the run began with."""
        return self.teacher in ("frozen", "trust_region")

    @property
    def pulls_weights(self) -> bool:
        """Whether teachers in their own processes pull the versions that the trainer publishes."""
        return self.has_own_actors and self.follows_trainer

    def has_own_head(self, updates: int) -> bool:
        """Whether hidden states come from a teacher with another head than the trainer's.

        In a step of several updates the trainer's own head moves, and a live teacher's does not.
        """
        return self.teacher_output == "hidden" and (self.teacher != "live" or updates > 1)
