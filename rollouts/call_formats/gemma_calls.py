"""Formats like `call:NAME{key:<|"|>text<|"|>,count:3}`: Gemma 4 and FunctionGemma."""

import json
import re
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.call_formats.port import (
    LITERALS,
    CallFormat,
    Schemas,
    as_json,
    blocks,
    one_call,
)
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ParsedAction,
    ToolCall,
    Unreadable,
    unique,
)

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
        return key if _PLAIN_KEY.fullmatch(key) else self._shown(key)


_PLAIN_KEY = re.compile(r"[^\s:{}\[\],<]+(?: [^\s:{}\[\],<]+)*")
_KEY = re.compile(r"([^:{}\[\],]+):")
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
        found = _KEY.match(self.text, self.at)
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
