"""Hint templates for error sites: one sentence filled with the error's own data.

A hint states what was wrong with the call, never the answer; a hint that contains the answer is
refused. Other hint sources are in `hint_sources`; `alignment` inserts hints into contexts.
"""

from collections.abc import Iterator, Mapping
from string import Formatter

from composer_mesh.configs.hints import checked_template
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.traces import ErrorSite

PREFIX = "Hint: "


class HintLeak(ValueError):
    """A hint contains the verified answer."""


class HintTemplateError(KeyError):
    """The template that a site names does not exist, or it needs data that the site lacks."""

    def __str__(self) -> str:
        return str(self.args[0])


class HintTemplates(Mapping[str, str]):
    """Templates by `hint_template_key`; `{field}` is replaced by a field of the error's data."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._texts: dict[str, str] = {}
        for key, text in templates.items():
            self.register(key, text)

    def register(self, key: str, template: str, *, replace: bool = False) -> None:
        """Add a template before a run starts; raise ValueError for a taken key or invalid text."""
        if key in self._texts and not replace:
            raise ValueError(
                f"hint template {key!r} is there already: pass replace=True, or name another key"
            )
        self._texts[key] = checked_template(template)

    def extended(self, templates: Mapping[str, str]) -> "HintTemplates":
        """Return a copy with `templates` added; they replace templates with equal keys."""
        return HintTemplates({**self._texts, **templates})

    def fill(self, site: ErrorSite) -> str:
        """Fill the site's template; values are inserted literally, including braces."""
        template = self[site.hint_template_key]
        for _, field, _, _ in Formatter().parse(template):
            if field is not None and field not in site.data:
                raise HintTemplateError(
                    f"hint template {site.hint_template_key!r} names the field {field!r} but an "
                    f"error of kind {site.error_kind!r} has only {_listed(site.data)}: use one of "
                    "these, or let the environment give the field"
                )
        return template.format_map(site.data)

    def __getitem__(self, key: str) -> str:
        if key not in self._texts:
            raise HintTemplateError(
                f"no hint template {key!r}: use one of {_listed(self._texts)}, or add it under "
                "[sdpo.hints.templates]"
            )
        return self._texts[key]

    def __contains__(self, key: object) -> bool:
        return key in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


TEMPLATES = HintTemplates(
    {
        "unknown_tool": "There is no tool {tool}. Use one of: {tools}.",
        "malformed_call": "Write one tool call as valid JSON: {reason}.",
        "wrong_type": "The argument {argument} of {tool} must be {wanted}.",
        "missing_argument": "{tool} needs the arguments {arguments}.",
        "unknown_argument": "{tool} takes only the arguments {arguments}.",
        "bad_value": "{argument} is not a value that {tool} takes.",
        "missing_key": "There is no key {key}. The keys are: {keys}.",
        "unknown_unit": "Units convert only so: {units}.",
        "division_by_zero": "Do not divide by zero; check the order.",
        "overflow": "Numbers go up to {limit}.",
        "tool_timeout": "{tool} takes too long for this. Ask it for less.",
        "tool_error": "The call failed: {text}",
        "wrong_answer": "{answer} is wrong. Do every step, then copy the last result.",
        "no_answer": "Do not give up. Call the next tool.",
    }
)


def render_hint(
    site: ErrorSite, answer: str | None = None, templates: HintTemplates = TEMPLATES
) -> str:
    """Return the hint for a site; raise HintTemplateError (a KeyError), or HintLeak for a leak."""
    text = PREFIX + templates.fill(site)
    refuse_leak(text, answer, f"the hint for {site.error_kind!r}")
    return text


def refuse_leak(text: str, answer: str | None, what: str) -> None:
    """Raise HintLeak if a text contains the verified answer."""
    if answer is not None and holds_answer(text, answer):
        raise HintLeak(f"{what} holds the answer {answer}: reword it")


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(names) or "none"
