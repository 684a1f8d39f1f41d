"""The channels of gpt-oss: thinking, calls and the answer are messages of one action."""

import re
from dataclasses import dataclass

from composer_mesh.rollouts.call_formats.port import Schemas, as_json, json_object, one_call
from composer_mesh.rollouts.tool_calls import MalformedCall, ParsedAction, ToolCall, Unreadable

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN = "<|call|>", "<|return|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""What stands before an answer."""

_TO = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class HarmonyCalls:
    """`analysis` is thinking, kept here in `<think>` tags; `commentary` with a recipient is a call;
    `final` is the answer. An action makes one call, which ends it."""

    name: str = "harmony"
    end_tokens: tuple[str, ...] = (END,)

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
