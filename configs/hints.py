"""Hints for the SDPO teacher: where they come from, who words them, and how long they may be.

Holds no credentials: `api_key_env` names an environment variable, never its value.
"""

from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_mesh.configs.base import Count, FilePath, NotNegative, Positive, Section
from composer_mesh.configs.endpoint import ChatEndpoint

HintSource = Literal["error", "sibling", "feedback"]


def checked_template(template: str) -> str:
    """The template itself; raises ValueError where a placeholder is more than a plain field name.

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
                f"template is {template!r} but its placeholder {name!r} is no plain field name: "
                "write {name}, without index, attribute or format"
            )
    return template


Template = Annotated[str, Field(min_length=1), AfterValidator(checked_template)]


class HintWriterConfig(ChatEndpoint):
    """The model that words the hints of the error source."""

    timeout_s: Positive = 10.0
    """Seconds that a group waits for all its hints; the template stands in for what is missing."""

    max_concurrent: Count = 8
    """Requests that are under way together."""

    budget_requests: Count = 1000
    """Requests of the whole run; hints that the cache holds cost none."""

    budget_usd: NotNegative = 1.0
    """Dollars of the whole run; 0 lets only free answers in."""

    assumed_usd: NotNegative = 0.001
    """Dollars set aside for a request under way, and charged where the provider names no price."""

    cache: FilePath | None = None
    """SQLite file that keeps answers between runs; hints.sqlite in the run directory if not set."""

    @model_validator(mode="after")
    def _a_request_fits_the_budget(self) -> Self:
        if self.assumed_usd > self.budget_usd:
            raise ValueError(
                f"assumed_usd is {self.assumed_usd} but budget_usd is {self.budget_usd}, so no "
                "request may ever be sent: raise budget_usd or lower assumed_usd"
            )
        return self


class HintsConfig(Section):
    """What the teacher is shown that the student was not."""

    sources: Annotated[tuple[HintSource, ...], Field(strict=False, min_length=1)] = ("error",)
    """Where hints come from, the preferred one first. "error": what was wrong with the action;
    "sibling": what a successful rollout of the same prompt did before its answer; "feedback": what
    the environment said to the action."""

    max_tokens: Count = 256
    """Longest text of a hint; a longer one is cut and counted."""

    templates: dict[str, Template] = Field(default_factory=dict)
    """Texts by hint_template_key, beside or instead of the built-in ones; {field} is filled from
    the error's own data."""

    writer: Literal["template", "llm"] = "template"
    """Who words the hints of the error source. "llm": a model asked over the OpenAI chat protocol,
    with the template where it does not answer."""

    llm: HintWriterConfig | None = None
    """The model that writer = "llm" asks."""

    @model_validator(mode="after")
    def _sources_are_named_once(self) -> Self:
        for source in self.sources:
            if self.sources.count(source) > 1:
                raise ValueError(
                    f"sources is {list(self.sources)} but its order is a preference, in which "
                    f"{source!r} can stand once: remove the later one"
                )
        return self

    @model_validator(mode="after")
    def _the_writer_can_write(self) -> Self:
        if self.writer == "template":
            return self
        if self.llm is None:
            raise ValueError(
                "writer is 'llm' but llm is not set, so nobody can be asked: add a table "
                "[sdpo.hints.llm] with kind, or set writer to 'template'"
            )
        if "error" not in self.sources:
            raise ValueError(
                f"writer is 'llm' but sources is {list(self.sources)}, and an llm words only "
                "hints of the source 'error': add 'error' to sources or set writer to 'template'"
            )
        return self

    @property
    def asked(self) -> HintWriterConfig | None:
        """The writer that a run with these hints asks; None where templates alone do."""
        return self.llm if self.writer == "llm" else None

    @property
    def has_builtin_writer(self) -> bool:
        """Whether the run itself must serve the writer."""
        return self.asked is not None and self.asked.kind == "builtin"
