"""Hints for error sites: one sentence from a template, filled with the error's own data.

A hint says what was wrong with the call, never the answer; a hint that would hold the answer is
refused. Other sources of hints are `hint_sources`; where one goes in a context is alignment's
business.
"""

from collections.abc import Iterator, Mapping
from string import Formatter

from composer_mesh.configs.hints import checked_template
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.traces import ErrorSite

PREFIX = "Hint: "


class HintLeak(ValueError):
    """A hint would have told the verified answer."""


class HintTemplateError(KeyError):
    """A site asks for a template that is not there, or a template for data that a site lacks."""

    def __str__(self) -> str:
        return str(self.args[0])


class HintTemplates(Mapping[str, str]):
    """Texts by `hint_template_key`; `{field}` stands for a field of the error's data."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        self._texts: dict[str, str] = {}
        for key, text in templates.items():
            self.register(key, text)

    def register(self, key: str, template: str, *, replace: bool = False) -> None:
        """Add a template before a run starts; raises ValueError for a taken key or a bad text."""
        if key in self._texts and not replace:
            raise ValueError(
                f"hint template {key!r} is there already: pass replace=True, or name another key"
            )
        self._texts[key] = checked_template(template)

    def extended(self, templates: Mapping[str, str]) -> "HintTemplates":
        """These templates with others beside them, or instead of them where keys are equal."""
        return HintTemplates({**self._texts, **templates})

    def fill(self, site: ErrorSite) -> str:
        """The site's sentence; values are put in as they are, braces in them mean nothing."""
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
        "wrong_answer": "{answer} is wrong. Do every step, then copy the last result.",
        "no_answer": "Do not give up. Call the next tool.",
    }
)


def render_hint(
    site: ErrorSite, answer: str | None = None, templates: HintTemplates = TEMPLATES
) -> str:
    """The hint for a site; raises HintTemplateError (a KeyError), or HintLeak for a leak."""
    text = PREFIX + templates.fill(site)
    refuse_leak(text, answer, f"the hint for {site.error_kind!r}")
    return text


def refuse_leak(text: str, answer: str | None, what: str) -> None:
    """Raise HintLeak where a text tells the verified answer."""
    if answer is not None and holds_answer(text, answer):
        raise HintLeak(f"{what} holds the answer {answer}: reword it")


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(names) or "none"
