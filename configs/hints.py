"""Hints for the SDPO teacher: sources, writer and length limits.

Contains no credentials: `api_key_env` names an environment variable.
"""

from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_mesh.configs.base import (
    MOST_ENTRIES,
    Concurrent,
    Count,
    Dollars,
    FilePath,
    Seconds,
    Section,
    Tokens,
)
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
                f"template is {template!r} but its placeholder {name!r} is no plain field name: "
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
    """Dollars reserved for a request in flight, more once a request has cost more; charged if the
    provider reports no price."""

    cache: FilePath | None = None
    """SQLite cache of answers, shared by runs; hints.sqlite in the run directory if not set."""

    @model_validator(mode="after")
    def _a_request_fits_the_budget(self) -> Self:
        if self.assumed_usd > self.budget_usd:
            raise ValueError(
                f"assumed_usd is {self.assumed_usd} but budget_usd is {self.budget_usd}, so no "
                "request may ever be sent: raise budget_usd or lower assumed_usd"
            )
        return self


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
    def active_writer(self) -> HintWriterConfig | None:
        """The configured hint writer; None if only templates are used."""
        return self.llm if self.writer == "llm" else None

    @property
    def has_builtin_writer(self) -> bool:
        """Whether the run itself serves the hint writer."""
        return self.active_writer is not None and self.active_writer.kind == "builtin"
