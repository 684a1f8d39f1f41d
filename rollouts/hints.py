"""Hints for error sites: one sentence from a template, filled with the error's own data.

A hint says what was wrong with the call, never the answer; a hint that would hold the answer is
refused. Where a hint goes in a context is alignment's business.
"""

import re

from composer_mesh.rollouts.traces import ErrorSite

TEMPLATES: dict[str, str] = {
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


class HintLeak(ValueError):
    """A hint would have told the verified answer."""


def render_hint(site: ErrorSite, answer: str | None = None) -> str:
    """The hint for a site; raises KeyError for an unknown template, HintLeak for a leak."""
    if site.hint_template_key not in TEMPLATES:
        raise KeyError(
            f"no hint template {site.hint_template_key!r}: use one of {', '.join(TEMPLATES)}"
        )
    text = "Hint: " + TEMPLATES[site.hint_template_key].format_map(site.data)
    if answer is not None and _holds(text, answer):
        raise HintLeak(f"the hint for {site.error_kind!r} holds the answer {answer}: reword it")
    return text


def _holds(text: str, answer: str) -> bool:
    """Whether a text has the answer as a number or word of its own; 12 is not in 120 or 1.12."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return re.search(rf"(?<![\w.-]){re.escape(answer)}(?!\w|\.\d)", plain) is not None
