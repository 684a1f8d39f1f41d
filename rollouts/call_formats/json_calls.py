"""Formats whose calls are JSON: Hermes and Qwen, Llama 3, Mistral, Granite 3, Phi-4-mini."""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

from composer_mesh.rollouts.call_formats.port import (
    ParsedAction,
    Schemas,
    Unreadable,
    apart_from_thinking,
    as_json,
    blocks,
    json_value,
    one_call,
)
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    call_text,
    parse_calls,
    text_before_calls,
)


@dataclass(frozen=True)
class HermesCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4.

    It is also the form in which everything here keeps calls: its text is never rewritten.
    """

    name: str = "hermes"
    end_tokens: tuple[str, ...] = ()

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        found = parse_calls(text)
        if isinstance(found, MalformedCall):
            return found
        return ParsedAction(text_before_calls(text) if found else text, found)

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(call_text(c.name, c.arguments) for c in spoken.calls)


@dataclass(frozen=True)
class ListedJson:
    """A token, and a JSON list of calls: Mistral before v11, Granite 3, Phi-4-mini, Cohere."""

    name: str
    opening: str
    closing: str = ""
    named: str = "name"
    given: str = "arguments"
    with_ids: bool = False
    end_tokens: tuple[str, ...] = ()

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        thinking, rest = apart_from_thinking(text, self.opening)
        try:
            if self.closing:
                before, insides = blocks(rest, self.opening, self.closing)
            else:
                before, *insides = rest.split(self.opening)
            if len(insides) > 1:
                raise Unreadable(f"write {self.opening} once, with a list of all calls")
            calls = [self._call(one) for inside in insides for one in _listed(inside)]
        except Unreadable as error:
            return MalformedCall(text, str(error))
        return ParsedAction(thinking + before, tuple(calls))

    def write(self, spoken: ParsedAction) -> str:
        if not spoken.calls:
            return spoken.text
        listed = []
        for call in spoken.calls:
            one: dict[str, Any] = {self.named: call.name, self.given: call.arguments}
            listed.append({**one, "id": call.id} if self.with_ids else one)
        return f"{spoken.text}{self.opening}{as_json(listed)}{self.closing}"

    def _call(self, one: Any) -> ToolCall:
        if not isinstance(one, dict) or not isinstance(one.get(self.named), str):
            raise Unreadable(f'the call needs a "{self.named}"')
        if not isinstance(one.get(self.given), dict):
            raise Unreadable(f'the call needs an object "{self.given}"')
        return one_call(one[self.named], one[self.given], str(one.get("id") or ""))


def _listed(text: str) -> list[Any]:
    found = json_value(text, "the calls")
    if not isinstance(found, list) or not found:
        raise Unreadable("write the calls as a JSON list")
    return found


@dataclass(frozen=True)
class LlamaJson:
    """`{"name": …, "parameters": {…}}` as the whole answer, several with `; ` between: Llama 3."""

    name: str = "llama_json"
    end_tokens: tuple[str, ...] = ()

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        begun = text.lstrip().startswith(("{", PYTHON_TAG))
        thinking, answer = ("", text) if begun else apart_from_thinking(text, PYTHON_TAG)
        before, token, code = answer.partition(PYTHON_TAG)
        body = (code if token else answer).strip()
        if not token and not body.startswith("{"):
            return ParsedAction(text)
        try:
            calls = _objects(body)
        except Unreadable as error:
            # An answer may be JSON; a call cannot be taken for one.
            said_call = token or '"name"' in body.partition("}")[0]
            return MalformedCall(text, str(error)) if said_call else ParsedAction(text)
        return ParsedAction(thinking + before if token else thinking, tuple(calls))

    def write(self, spoken: ParsedAction) -> str:
        calls = [
            f'{{"name": {as_json(c.name)}, "parameters": {as_json(c.arguments)}}}'
            for c in spoken.calls
        ]
        return spoken.text + "; ".join(calls)


PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"\s*;?\s*")


def _objects(text: str) -> list[ToolCall]:
    """Parse JSON objects behind each other, with semicolons or white space between them."""
    found, at = [], 0
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise Unreadable("the call is not valid JSON") from None
        found.append(_llama_call(value))
        at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
    if not found:
        raise Unreadable("the call is empty")
    return found


def _llama_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable('the call needs a "name"')
    if not isinstance(value.get("parameters"), dict):
        raise Unreadable('the call needs an object "parameters"')
    return one_call(value["name"], value["parameters"])
