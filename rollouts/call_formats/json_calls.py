"""Formats whose calls are JSON: Hermes and Qwen, Llama 3, Mistral, Granite 3, Phi-4-mini."""

from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.call_formats.port import (
    CallFormat,
    Schemas,
    as_json,
    blocks,
    json_value,
    one_call,
)
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ParsedAction,
    ToolCall,
    Unreadable,
    call_text,
    json_at,
    read_action,
    space_ends,
)


@dataclass(frozen=True)
class HermesCalls(CallFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4.

    It is also the form in which everything here keeps calls: its text is never rewritten.
    """

    name: str = "hermes"

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        return read_action(text)

    def write(self, spoken: ParsedAction) -> str:
        return spoken.text + "\n".join(call_text(c.name, c.arguments) for c in spoken.calls)


@dataclass(frozen=True)
class ListedJson(CallFormat):
    """A token, and a JSON list of calls: Mistral before v11, Granite 3, Phi-4-mini, Cohere."""

    name: str
    opening: str
    closing: str = ""
    named: str = "name"
    given: str = "arguments"
    with_ids: bool = False

    def write(self, spoken: ParsedAction) -> str:
        if not spoken.calls:
            return spoken.text
        listed = []
        for call in spoken.calls:
            one: dict[str, Any] = {self.named: call.name, self.given: call.arguments}
            listed.append({**one, "id": call.id} if self.with_ids else one)
        return f"{spoken.text}{self.opening}{as_json(listed)}{self.closing}"

    def _read(self, text: str) -> ParsedAction:
        if self.closing:
            before, insides = blocks(text, self.opening, self.closing)
        else:
            before, *insides = text.split(self.opening)
        if len(insides) > 1:
            raise Unreadable(f"write {self.opening} once, with a list of all calls")
        calls = [self._call(one) for inside in insides for one in _listed(inside)]
        return ParsedAction(before, tuple(calls))

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
class LlamaJson(CallFormat):
    """`{"name": …, "parameters": {…}}` as the whole answer, several with `; ` between: Llama 3."""

    name: str = "llama_json"

    def _read(self, text: str) -> ParsedAction:
        before, token, code = text.partition(PYTHON_TAG)
        body = (code if token else text).strip()
        if not token and not body.startswith("{"):
            return ParsedAction(text)
        try:
            calls = _objects(body)
        except Unreadable:
            # An answer may be JSON; a call cannot be taken for one.
            if token or '"name"' in body.partition("}")[0]:
                raise
            return ParsedAction(text)
        return ParsedAction(before if token else "", tuple(calls))

    def write(self, spoken: ParsedAction) -> str:
        calls = [
            f'{{"name": {as_json(c.name)}, "parameters": {as_json(c.arguments)}}}'
            for c in spoken.calls
        ]
        return spoken.text + "; ".join(calls)


PYTHON_TAG = "<|python_tag|>"


def _objects(text: str) -> list[ToolCall]:
    """Parse JSON objects behind each other, with semicolons or white space between them."""
    found, at = [], 0
    while at < len(text):
        value, at = json_at(text, at)
        found.append(_llama_call(value))
        at = space_ends(text, at)
        if text.startswith(";", at):
            at = space_ends(text, at + 1)
    if not found:
        raise Unreadable("the call is empty")
    return found


def _llama_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable('the call needs a "name"')
    if not isinstance(value.get("parameters"), dict):
        raise Unreadable('the call needs an object "parameters"')
    return one_call(value["name"], value["parameters"])
