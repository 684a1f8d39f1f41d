"""Formats whose arguments stand in tags without types: Qwen3-Coder and Qwen3.5, Nemotron 3, GLM."""

import re
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.call_formats.port import (
    ParsedAction,
    Schemas,
    Unreadable,
    apart_from_thinking,
    as_json,
    blocks,
    one_call,
    schema_of,
    typed,
    unique,
)
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN, MalformedCall, ToolCall


@dataclass(frozen=True)
class QwenXml:
    """`<function=NAME>` with `<parameter=KEY>` in it: Qwen3-Coder, Qwen3.5, Nemotron 3."""

    name: str = "qwen_xml"
    end_tokens: tuple[str, ...] = ()

    def read(self, text: str, schemas: Schemas, /) -> ParsedAction | MalformedCall:
        return _read(text, schemas, _qwen_call)

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(_qwen_text(call) for call in spoken.calls)


@dataclass(frozen=True)
class GlmXml:
    """The name, then `<arg_key>` and `<arg_value>` in turns: GLM-4.5 and later."""

    name: str = "glm"
    between: str = "\n"
    end_tokens: tuple[str, ...] = ()

    def read(self, text: str, schemas: Schemas, /) -> ParsedAction | MalformedCall:
        return _read(text, schemas, _glm_call)

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(self._text(call) for call in spoken.calls)

    def _text(self, call: ToolCall) -> str:
        arguments = [
            f"<arg_key>{key}</arg_key>{self.between}<arg_value>{_shown(value)}</arg_value>"
            for key, value in call.arguments.items()
        ]
        return f"{OPEN}{self.between.join([call.name, *arguments])}{self.between}{CLOSE}"


def _read(text: str, schemas: Schemas, call: Any) -> ParsedAction | MalformedCall:
    thinking, rest = apart_from_thinking(text, OPEN)
    try:
        before, insides = blocks(rest, OPEN, CLOSE)
        return ParsedAction(thinking + before, tuple(call(inside, schemas) for inside in insides))
    except Unreadable as error:
        return MalformedCall(text, str(error))


_FUNCTION, _FUNCTION_ENDS = "<function=", "</function>"
_NAME = re.compile(r"[^\s<>]+")
_PARAMETER = re.compile(r"<parameter=([^\n<>]+)>(.*?)</parameter>\s*", re.DOTALL)


def _qwen_call(inside: str, schemas: Schemas) -> ToolCall:
    inside = inside.strip()
    name, named, body = inside.removeprefix(_FUNCTION).removesuffix(_FUNCTION_ENDS).partition(">")
    framed = inside.startswith(_FUNCTION) and inside.endswith(_FUNCTION_ENDS)
    if not framed or not named or not _NAME.fullmatch(name):
        raise Unreadable("the call needs <function=NAME> and </function>")
    pairs = []
    for key, value in _all(_PARAMETER, body.strip(), "<parameter=NAME> and </parameter>"):
        plain = value.removeprefix("\n").removesuffix("\n")
        pairs.append((key, typed(plain, schema_of(schemas, name, key))))
    return one_call(name, unique(pairs))


def _qwen_text(call: ToolCall) -> str:
    given = [
        f"<parameter={key}>\n{_shown(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    ]
    return f"{OPEN}\n<function={call.name}>\n{''.join(given)}</function>\n{CLOSE}"


_GLM = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _glm_call(inside: str, schemas: Schemas) -> ToolCall:
    name, opened, rest = inside.partition("<arg_key>")
    name = name.strip()
    pairs = [
        (key.strip(), typed(value, schema_of(schemas, name, key.strip())))
        for key, value in _all(_GLM, opened + rest, "<arg_key>NAME</arg_key> and <arg_value>")
    ]
    return one_call(name, unique(pairs))


def _all(pattern: re.Pattern[str], body: str, what: str) -> list[tuple[str, str]]:
    """Return all matches, which must cover the body; raises `Unreadable`."""
    found, at = [], 0
    while at < len(body):
        match = pattern.match(body, at)
        if match is None:
            raise Unreadable(f"write each argument with {what}")
        found.append((match[1], match[2]))
        at = match.end()
    return found


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)
