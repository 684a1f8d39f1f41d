"""Formats whose arguments stand in tags without types: Qwen3-Coder and Qwen3.5, Nemotron 3, GLM."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.rollouts.call_formats.port import (
    CallFormat,
    Schemas,
    as_json,
    one_call,
    schemas_of,
    typed,
)
from composer_mesh.rollouts.tool_calls import (
    CLOSE,
    OPEN,
    MalformedCall,
    ParsedAction,
    ToolCall,
    Unreadable,
    behind_thinking,
    space_ends,
    tagged_calls,
    unique,
)


@dataclass(frozen=True)
class QwenXml(CallFormat):
    """`<function=NAME>` with `<parameter=KEY>` in it: Qwen3-Coder, Qwen3.5, Nemotron 3."""

    name: str = "qwen_xml"

    def read(self, text: str, schemas: Schemas, /) -> ParsedAction | MalformedCall:
        return _read(text, partial(_qwen_call, schemas))

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(_qwen_text(call) for call in spoken.calls)


@dataclass(frozen=True)
class GlmXml(CallFormat):
    """The name, then `<arg_key>` and `<arg_value>` in turns: GLM-4.5 and later."""

    name: str = "glm"
    between: str = "\n"

    def read(self, text: str, schemas: Schemas, /) -> ParsedAction | MalformedCall:
        return _read(text, partial(_glm_call, schemas))

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(self._text(call) for call in spoken.calls)

    def _text(self, call: ToolCall) -> str:
        arguments = [
            f"<arg_key>{key}</arg_key>{self.between}<arg_value>{_glm_value(value)}</arg_value>"
            for key, value in call.arguments.items()
        ]
        return f"{OPEN}{self.between.join([call.name, *arguments])}{self.between}{CLOSE}"


def _read(
    text: str, read: Callable[[str, int], tuple[ToolCall, int]]
) -> ParsedAction | MalformedCall:
    return behind_thinking(text, lambda spoken: tagged_calls(spoken, read))


_NAME = re.compile(r"[^\s<>]+")
_KEY = re.compile(r"[^\n<>]+")


def _qwen_call(schemas: Schemas, text: str, at: int) -> tuple[ToolCall, int]:
    name, at = _between(text, at, "<function=", ">")
    if not _NAME.fullmatch(name):
        raise Unreadable("the call needs <function=NAME> and </function>")
    pairs, at = [], space_ends(text, at)
    while not text.startswith("</function>", at):
        key, at = _between(text, at, "<parameter=", ">")
        if not _KEY.fullmatch(key):
            raise Unreadable("write each argument with <parameter=NAME> and </parameter>")
        value, at = _value(text, at, "", "</parameter>", "<parameter=")
        plain = value.removeprefix("\n").removesuffix("\n")
        pairs.append((key, typed(plain, schemas_of(schemas, name, key))))
        at = space_ends(text, at)
    return one_call(name, unique(pairs)), at + len("</function>")


def _qwen_text(call: ToolCall) -> str:
    given = [
        f"<parameter={key}>\n{_qwen_value(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    ]
    return f"{OPEN}\n<function={call.name}>\n{''.join(given)}</function>\n{CLOSE}"


def _qwen_value(value: Any) -> str:
    """Return a value as the templates write it: lists and mappings as JSON, others as Python."""
    return as_json(value) if isinstance(value, list | dict) else str(value)


_NAME_ENDS = re.compile("<arg_key>|</tool_call>")


def _glm_call(schemas: Schemas, text: str, at: int) -> tuple[ToolCall, int]:
    found = _NAME_ENDS.search(text, at)
    if found is None:
        raise Unreadable(f"the call is not closed by {CLOSE}")
    name, at, pairs = text[at : found.start()].strip(), found.start(), []
    while text.startswith("<arg_key>", at):
        key, at = _between(text, at, "<arg_key>", "</arg_key>")
        value, at = _value(text, space_ends(text, at), "<arg_value>", "</arg_value>", "<arg_key>")
        pairs.append((key.strip(), typed(value, schemas_of(schemas, name, key.strip()))))
        at = space_ends(text, at)
    return one_call(name, unique(pairs)), at


def _glm_value(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _between(text: str, at: int, opening: str, closing: str) -> tuple[str, int]:
    """Return what stands between two tags at a place, and where the second ends."""
    end = text.find(closing, at) if text.startswith(opening, at) else -1
    if end < 0:
        raise Unreadable(f"the call needs {opening}… and {closing} around each part")
    return text[at + len(opening) : end], end + len(closing)


def _value(text: str, at: int, opening: str, closing: str, following: str) -> tuple[str, int]:
    """Return a value; one with the tag of another argument in it was not closed."""
    value, at = _between(text, at, opening, closing)
    if following in value:
        raise Unreadable(f"an argument is not closed by {closing}")
    return value, at
