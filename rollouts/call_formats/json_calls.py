"""Formats whose calls, or arguments, are JSON.

Calls are JSON: Hermes and Qwen, Llama 3, Mistral, Granite 3, Phi-4-mini. Control tokens stand
between a name and JSON: Kimi, DeepSeek, Mistral from v11 on, and the channels of gpt-oss, where
thinking, calls and the answer are messages of one action.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from composer_mesh.rollouts.call_formats.port import (
    CallFormat,
    Schemas,
    as_json,
    blocks,
    json_object,
    json_value,
    named_call,
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
        calls = [
            named_call(one, self.named, self.given, "id")
            for inside in insides
            for one in _listed(inside)
        ]
        return ParsedAction(before, tuple(calls))


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
        found.append(named_call(value, given="parameters"))
        at = space_ends(text, at)
        if text.startswith(";", at):
            at = space_ends(text, at + 1)
    if not found:
        raise Unreadable("the call is empty")
    return found


START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""What stands before an answer."""

_TO = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class HarmonyCalls(CallFormat):
    """`analysis` is thinking, kept here in `<think>` tags; `commentary` with a recipient is a call;
    `final` is the answer. An action makes one call, which ends it."""

    name: str = "harmony"
    end_tokens: ClassVar[tuple[str, ...]] = (END,)

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        try:
            return _read(text)
        except Unreadable as error:
            return MalformedCall(text, str(error))

    def write(self, spoken: ParsedAction) -> str:
        text, thinking = spoken.text, ""
        if text.startswith("<think>"):
            thinking, _, text = text.removeprefix("<think>").partition("</think>")
        parts = [f"{CHANNEL}analysis{MESSAGE}{thinking}"] if thinking else []
        if spoken.calls and text:
            parts.append(f"{CHANNEL}commentary{MESSAGE}{text}")
        parts += [_call_text(call) for call in spoken.calls] or [f"{FINAL}{text}"]
        return f"{END}{START}assistant".join(parts)


def _call_text(call: ToolCall) -> str:
    given = as_json(call.arguments)
    return f" to=functions.{call.name}{CHANNEL}commentary json{MESSAGE}{given}"


def _read(text: str) -> ParsedAction | MalformedCall:
    thinking, said, calls = "", "", list[ToolCall]()
    for at, part in enumerate(text.split(END)):
        head, opened, body = part.partition(MESSAGE)
        if not opened:
            if part.strip() and at:
                raise Unreadable(f"a message has no {MESSAGE}")
            said += part
            continue
        head = head.removeprefix(f"{START}assistant")
        recipient, channel = _TO.search(head), head.partition(CHANNEL)[2].split()
        if recipient is not None:
            calls.append(_call(recipient[1], body))
        elif calls and body.strip():
            raise Unreadable("text stands behind the call: end with the call")
        elif channel[:1] == ["analysis"]:
            thinking += body
        else:
            said += body
    if len(calls) > 1:
        raise Unreadable("write exactly one tool call")
    thought = f"<think>{thinking}</think>" if thinking else ""
    return ParsedAction(thought + said, tuple(calls))


def _call(recipient: str, body: str) -> ToolCall:
    return one_call(recipient.removeprefix("functions."), json_object(body, "the arguments"))


@dataclass(frozen=True)
class TokenFramed(CallFormat):
    """A section of calls, each with a name, a separator and JSON between tokens.

    `head` stands before each name and `fence` around the JSON, where the family has them.
    """

    name: str
    section: tuple[str, str]
    call: tuple[str, str]
    separator: str
    head: str = ""
    fence: tuple[str, str] = ("", "")
    between: str = ""
    numbered: bool = False
    """Names are written as ids: `functions.NAME:NUMBER`."""

    def write(self, spoken: ParsedAction) -> str:
        if not spoken.calls:
            return spoken.text
        texts = [self._text(call, at) for at, call in enumerate(spoken.calls)]
        return f"{spoken.text}{self.section[0]}{self.between.join(texts)}{self.section[1]}"

    def _read(self, text: str) -> ParsedAction:
        before, sections = blocks(text, *self.section)
        if any(token in before for token in self.call):
            raise Unreadable(f"calls stand between {self.section[0]} and {self.section[1]}")
        if len(sections) > 1:
            raise Unreadable(f"write {self.section[0]} once, around all calls")
        calls = [one for section in sections for one in self._calls(section)]
        return ParsedAction(before, tuple(calls))

    def _calls(self, section: str) -> list[ToolCall]:
        before, insides = blocks(section, *self.call)
        if before.strip() or not insides:
            raise Unreadable(f"write each call between {self.call[0]} and {self.call[1]}")
        return [self._call(inside) for inside in insides]

    def _call(self, inside: str) -> ToolCall:
        named, separated, given = inside.partition(self.separator)
        if not separated:
            raise Unreadable(f"the call needs {self.separator} between name and arguments")
        if not named.startswith(self.head):
            raise Unreadable(f"the call needs {self.head!r} before its name")
        named, call_id = named.removeprefix(self.head).strip(), ""
        opening, closing = self.fence
        if opening:
            line, _, given = given.partition(opening)
            if not given.rstrip().endswith(closing.strip()):
                raise Unreadable(f"the arguments need {opening.strip()} around them")
            named, given = line.strip(), given.rstrip().removesuffix(closing.strip())
        if self.numbered:
            named, call_id = named.rpartition(":")[0].removeprefix("functions."), named
        return one_call(named, json_object(given, "the arguments"), call_id)

    def _text(self, call: ToolCall, at: int) -> str:
        opening, closing = self.call
        given = f"{self.fence[0]}{as_json(call.arguments)}{self.fence[1]}"
        name = call.id or f"functions.{call.name}:{at}" if self.numbered else call.name
        if self.fence[0]:
            return f"{opening}{self.head}{self.separator}{name}{given}{closing}"
        return f"{opening}{self.head}{name}{self.separator}{given}{closing}"


@dataclass(frozen=True)
class MistralArgs(CallFormat):
    """`[TOOL_CALLS]NAME[ARGS]{…}` for each call: Mistral's tokenizers from v11 on."""

    name: str = "mistral_args"

    def write(self, spoken: ParsedAction) -> str:
        calls = [f"{TOOL_CALLS}{c.name}{ARGS}{as_json(c.arguments)}" for c in spoken.calls]
        return spoken.text + "".join(calls)

    def _read(self, text: str) -> ParsedAction:
        before, *bodies = text.split(TOOL_CALLS)
        if ARGS in before:
            raise Unreadable(f"a call is not opened by {TOOL_CALLS}")
        return ParsedAction(before, tuple(self._call(body) for body in bodies))

    def _call(self, body: str) -> ToolCall:
        named, separated, given = body.partition(ARGS)
        if not separated:
            raise Unreadable(f"the call needs {ARGS} between name and arguments")
        name, _, call_id = named.partition(CALL_ID)
        return one_call(name.strip(), json_object(given, "the arguments"), call_id.strip())


TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
