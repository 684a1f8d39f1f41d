"""Formats whose arguments stand in tags: Qwen3-Coder and Qwen3.5, Nemotron 3, GLM, and Gemma.

Those in XML have no types. Gemma 4 and FunctionGemma write `call:NAME{key:<|"|>text<|"|>,count:3}`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from composer_mesh.rollouts.call_formats.port import (
    LITERALS,
    CallFormat,
    Schemas,
    as_json,
    blocks,
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
        value, at = _tag_value(text, at, "", "</parameter>", "<parameter=")
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
        value, at = _tag_value(
            text, space_ends(text, at), "<arg_value>", "</arg_value>", "<arg_key>"
        )
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


def _tag_value(text: str, at: int, opening: str, closing: str, following: str) -> tuple[str, int]:
    """Return a value; one with the tag of another argument in it was not closed."""
    value, at = _between(text, at, opening, closing)
    if following in value:
        raise Unreadable(f"an argument is not closed by {closing}")
    return value, at


MOST_DEPTH = 100


@dataclass(frozen=True)
class GemmaCalls(CallFormat):
    """Calls between two tokens; mappings have bare keys, and texts stand between quote tokens.

    Thinking stands in a channel of its own; it is kept here in `<think>` tags.
    """

    name: str
    opening: str
    closing: str
    quote: str
    channel: tuple[str, str] = ("", "")

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        if not self.channel[0]:
            return super().read(text, _)
        try:
            thinking, rest = self._thinking(text)
            found = self._read(rest)
        except Unreadable as error:
            return MalformedCall(text, str(error))
        return ParsedAction(thinking + found.text, found.calls)

    def write(self, spoken: ParsedAction) -> str:
        text = spoken.text
        opening, closing = self.channel
        if opening and text.startswith("<think>"):
            thinking, _, answer = text.removeprefix("<think>").partition("</think>")
            text = f"{opening}{thinking}{closing}{answer}"
        return text + "".join(self._text(call) for call in spoken.calls)

    def _read(self, text: str) -> ParsedAction:
        before, insides = blocks(text, self.opening, self.closing)
        return ParsedAction(before, tuple(self._call(inside) for inside in insides))

    def _thinking(self, text: str) -> tuple[str, str]:
        opening, closing = self.channel
        if not text.lstrip().startswith(opening):
            return "", text
        thinking, closed, rest = text.lstrip().removeprefix(opening).partition(closing)
        if not closed and self.opening in thinking:
            raise Unreadable(f"the thinking is not closed by {closing} before the call")
        return f"<think>{thinking}" + ("</think>" if closed else ""), rest

    def _call(self, inside: str) -> ToolCall:
        found = re.fullmatch(r"\s*call:([^\s{}]+)(\{.*\})\s*", inside, re.DOTALL)
        if found is None:
            raise Unreadable("write the call as call:NAME{ARGUMENT:VALUE}")
        reader = _Values(found[2], self.quote)
        value = reader.value()
        if reader.text[reader.at :].strip() or not isinstance(value, dict):
            raise Unreadable("text stands behind the arguments")
        return one_call(found[1], value)

    def _text(self, call: ToolCall) -> str:
        return f"{self.opening}call:{call.name}{self._shown(call.arguments)}{self.closing}"

    def _shown(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
            return (
                "{" + ",".join(f"{self._key(key)}:{self._shown(one)}" for key, one in pairs) + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(self._shown, value)) + "]"
        return str(value) if value is None else as_json(value)

    def _key(self, key: str) -> str:
        return key if _GEMMA_PLAIN_KEY.fullmatch(key) else self._shown(key)


_GEMMA_PLAIN_KEY = re.compile(r"[^\s:{}\[\],<]+(?: [^\s:{}\[\],<]+)*")
_GEMMA_KEY = re.compile(r"([^:{}\[\],]+):")
_BARE = re.compile(r"\s*([^\s:{}\[\],]+)\s*")


class _Values:
    """Reads values from a text, one after the other."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.at = text, 0
        self._quote = quote

    def value(self, depth: int = 0) -> Any:
        if depth > MOST_DEPTH:
            raise Unreadable(f"the arguments are nested more than {MOST_DEPTH} deep")
        if self._takes("{"):
            pairs = []
            while not self._takes("}"):
                key = self._key()
                pairs.append((key, self.value(depth + 1)))
                self._between("}")
            return unique(pairs)
        if self._takes("["):
            items = []
            while not self._takes("]"):
                items.append(self.value(depth + 1))
                self._between("]")
            return items
        return self._quoted() if self._takes(self._quote) else self._bare()

    def _takes(self, token: str) -> bool:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def _between(self, closing: str) -> None:
        if not self._takes(",") and not self.text.startswith(closing, self.at):
            raise Unreadable("arguments are set apart by commas")

    def _key(self) -> str:
        if self._takes(self._quote):
            key = self._quoted()
            if not self._takes(":"):
                raise Unreadable("a key is followed by a colon")
            return key
        found = _GEMMA_KEY.match(self.text, self.at)
        if found is None:
            raise Unreadable("the arguments are no mapping of names to values")
        self.at = found.end()
        return found[1].strip()

    def _quoted(self) -> str:
        end = self.text.find(self._quote, self.at)
        if end < 0:
            raise Unreadable(f"a text is not closed by {self._quote}")
        text, self.at = self.text[self.at : end], end + len(self._quote)
        return text

    def _bare(self) -> Any:
        found = _BARE.match(self.text, self.at)
        if found is None:
            raise Unreadable("a value is missing in the arguments")
        self.at = found.end()
        if found[1] in LITERALS:
            return LITERALS[found[1]]
        try:
            return json.loads(found[1])
        except ValueError:
            raise Unreadable(f"texts stand between {self._quote}") from None
