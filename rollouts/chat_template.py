"""What a model's chat template writes: whole conversations, and what stands behind an action.

Nothing is encoded here, and control tokens in contents are hidden already (`control_tokens`).

Where a conversation has its tools, calls and results, by what the chat template writes.

A template that leaves one of them out gets it as plain text: tools in the system message, calls in
the assistant's text, results in user messages.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, Protocol

from jinja2 import TemplateError

from composer_mesh.rollouts.call_formats.choosing import (
    EXAMPLE,
    HARMONY,
    CallStyle,
    Render,
    calling,
    styles,
)
from composer_mesh.rollouts.call_formats.json_calls import FINAL
from composer_mesh.rollouts.call_formats.port import CallFormat, ParsedAction
from composer_mesh.rollouts.control_tokens import ChatTemplateError
from composer_mesh.rollouts.tool_calls import ToolCall, wire_arguments
from composer_mesh.rollouts.traces import Message

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "qzname",
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {"qzkey": {"type": "string", "description": "Any text."}},
            "required": ["qzkey"],
        },
    },
}
PROBE_CALL = ToolCall("qzname", {"qzkey": "qzvalue"}, "a1b2c3d4e")
_USER: Message = {"role": "user", "content": "qzuser"}
_SYSTEM: Message = {"role": "system", "content": "qzsystem"}
_RESULT: Message = {"role": "tool", "content": "qzresult", "name": PROBE_CALL.name}
_SHAPE = ParsedAction("", (ToolCall("NAME", {"ARGUMENT": "VALUE"}, "a1b2c3d4e"),))


@dataclass(frozen=True)
class ToolPlacement:
    """Whether the template writes tools and results; `style` knows whether it writes calls."""

    style: CallStyle
    tools_by_template: bool = True
    results_by_template: bool = True

    @classmethod
    def probe(cls, render: Render, style: CallStyle) -> "ToolPlacement":
        """Return what a template writes, by looking for words of its own in what it renders."""
        tools = [PROBE_TOOL]
        called = calling(PROBE_CALL) if style.by_template else {"role": "assistant", "content": "a"}
        answered = [_USER, called, {**_RESULT, "tool_call_id": PROBE_CALL.id}]
        return cls(
            style,
            writes(render, [_USER], tools, PROBE_CALL.name, *PROBE_CALL.arguments),
            writes(render, style.messages(answered), tools, _RESULT["content"]),
        )

    def __str__(self) -> str:
        calls = "by the template" if self.style.by_template else "in the assistant's text"
        results = "by the template" if self.results_by_template else "in user messages"
        tools = "template" if self.tools_by_template else "system"
        return f'tools_in = "{tools}", {self.style.format.name} calls {calls}, results {results}'

    def applied(
        self, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return messages and tools as the template is given them."""
        placed = list(messages)
        if not self.style.by_template:
            placed = [_as_text(one, self.style.format) for one in placed]
        if not self.results_by_template:
            placed = list(_results_of_users(placed))
        if tools and not self.tools_by_template:
            placed, tools = _with_system(placed, tools_text(tools, self.style.format)), []
        return self.style.messages(placed), tools


def writes(
    render: Render, messages: list[Message], tools: list[dict[str, Any]], *words: str
) -> bool:
    """Whether all words are in what a template renders; not, where it refuses the messages."""
    try:
        text = render(messages, True, tools)
    except TemplateError:
        return False
    return all(word in text for word in words)


def writes_system(render: Render) -> bool:
    """Whether a template writes the text of a system message."""
    return writes(render, [_SYSTEM, _USER], [], _SYSTEM["content"])


def tools_text(tools: list[dict[str, Any]], calls: CallFormat) -> str:
    """Return what a system message says of tools, and of the format in which they are called."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call the functions that are listed here, with their parameters as JSON schemas.\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, replace NAME, ARGUMENT and VALUE, and end your message with the call:\n"
        f"{calls.write(_SHAPE)}\n"
        "The result follows between <tool_response> and </tool_response>."
    )


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _as_text(message: Message, calls: CallFormat) -> Message:
    """Write an assistant's calls as a part of its text."""
    made = message.get("tool_calls")
    if not made:
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    parsed = tuple(_call(one) for one in made)
    return {**kept, "content": calls.write(ParsedAction(str(message.get("content") or ""), parsed))}


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = wire_arguments(call["function"]["arguments"])
    return ToolCall(call["function"]["name"], arguments, str(call.get("id") or ""))


def _results_of_users(messages: list[Message]) -> Iterator[Message]:
    """Write results as user messages, one for all results of an action."""
    for is_result, group in groupby(messages, lambda one: one["role"] == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in group]
            yield {"role": "user", "content": "\n".join(texts)}
        else:
            yield from group


ACTION = "COMPOSERMESHACTION"
"""Placeholder of what an assistant says."""

QUESTION: Message = {"role": "user", "content": "q"}


DIRECTIVES = ("-d", "-m", "-I", "-H", "-M", "-S", *"aAwdbBmyYHIpMSfjUWcxXGuVeFDTR", "%")
"""What a template may write after % in the format of a date; % itself comes last."""


def pinned_date(date: str) -> str:
    """Return a macro that a template calls in place of `strftime_now`: the start of that day.

    A function would not reach the template: newer transformers pass plain data to it alone.
    """
    day = datetime.fromisoformat(date)
    parts = [(f"%{one}", day.strftime(f"%{one}")) for one in DIRECTIVES]
    filters = "".join(f"|replace({json.dumps(one)}, {json.dumps(text)})" for one, text in parts)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{filters} }}}}{{%- endmacro -%}}"


class TemplateRenderer(Protocol):
    """The part of the Hugging Face tokenizer interface that renders templates."""

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str: ...

    def get_chat_template(self, *, tools: list[dict[str, Any]] | None = None) -> str: ...


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the options and the format of tool calls of a run.

    `stops` are the tokens that end an action; `tool_calls` names a format, or "auto"; `tools_in` is
    "template", "system" or "auto"; `date` is what the template takes for today's, None for the
    clock's.
    """

    renderer: TemplateRenderer
    stops: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tool_calls: str = "auto"
    tools_in: str = "auto"
    date: str | None = None

    def text(
        self, messages: Sequence[Message], generate: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Render messages; raises TemplateError where the template refuses them."""
        given, tools = list(messages), tools or []
        if any(one["role"] == "system" for one in given) and not self._writes_system:
            raise ChatTemplateError(
                "the chat template does not write system messages, so the model would never read "
                "their text: put it into the first question, or use a template that writes them"
            )
        if tools or any(one.get("tool_calls") or one["role"] == "tool" for one in given):
            placement = self.placement if tools else self._placement
            given, tools = placement.applied(given, tools)
        return self._render(given, generate, tools)

    def after_answer(self, messages: Sequence[Message], generate: bool) -> str:
        """Return what follows an assistant's text before messages, from the end token on."""
        mark = _mark_for(messages)
        text = self.text([QUESTION, {"role": "assistant", "content": mark}, *messages], generate)
        _, found, after = text.rpartition(mark)
        if not found or not after.startswith(self.end_tokens(self.text_style.format)):
            raise ChatTemplateError(
                f"the chat template does not end an assistant turn with {' or '.join(self.stops)}"
                ": use a template that does, or set the tokenizer's eos_token to its end marker"
            )
        return after

    def after_calls(
        self, calls: Sequence[ToolCall], messages: Sequence[Message], generate: bool
    ) -> str:
        """Return what follows an assistant's calls before messages, from the end token on.

        The messages begin with the calls' results, in order.
        """
        mark = _mark_for(messages)
        marked = [ToolCall(one.name, {"mark": mark}, one.id or EXAMPLE.id) for one in calls]
        given = list(takewhile(lambda message: message["role"] == "tool", messages))
        results = [_answering(*pair) for pair in zip(given, marked, strict=False)]
        rest = [*results, *messages[len(results) :]]
        try:
            text = self.text([QUESTION, calling(*marked), *rest], generate)
        except (TemplateError, ChatTemplateError):
            if len(marked) == 1:
                raise
            # A template that takes one call a message writes its results behind that one.
            text = self.text([QUESTION, calling(marked[0]), *rest], generate)
        _, found, after = text.rpartition(mark)
        tokens = self.end_tokens(self.call_style.format)
        ends = [at for token in tokens if (at := after.find(token)) >= 0]
        if not found or not ends:
            raise ChatTemplateError(
                f"the chat template does not end a tool call with {' or '.join(self.stops)}: use a "
                "template that does, or list its end marker in generation_config.json"
            )
        return after[min(ends) :]

    @cached_property
    def placement(self) -> ToolPlacement:
        """Where tools, calls and results stand; raises `ChatTemplateError` where tools cannot."""
        placement = self._placement
        if placement.tools_by_template:
            return placement
        if self.tools_in == "template":
            raise ChatTemplateError(
                "policy.tools_in is 'template' but the chat template writes neither the names nor "
                "the parameters of tools: set it to 'system', or leave it out"
            )
        if not self._writes_system:
            raise ChatTemplateError(
                "the chat template writes neither tools nor system messages, so the model would "
                "never see its tools: use a template that writes one of them"
            )
        return placement

    @cached_property
    def call_style(self) -> CallStyle:
        """How the template writes calls; raises `ChatTemplateError` where no format reads them."""
        if found := self._named_styles:
            return found[0]
        if self._styles:
            raise ChatTemplateError(
                f"policy.tool_calls is {self.tool_calls!r} but the chat template writes tool calls "
                f"as {self._styles[0].format.name!r}: use that, or leave it out"
            )
        raise ChatTemplateError(
            "the chat template writes tool calls in an unknown format, so calls of "
            "the model would be taken for answers: use another template, or a task without tools"
        )

    @cached_property
    def text_style(self) -> CallStyle:
        """How actions are read where there are no tools: harmony has channels without them too."""
        said = [QUESTION, {"role": "assistant", "content": ACTION}]
        before = self._render(said, False, []).rpartition(ACTION)[0]
        return CallStyle(HARMONY) if before.endswith(FINAL) else CallStyle()

    @cached_property
    def ends_turns(self) -> bool:
        """Whether the template ends an assistant's last turn with a token of its own.

        The others end it with what begins the next message, which depends on who speaks.
        """
        said = [QUESTION, {"role": "assistant", "content": ACTION}]
        after = self._render(said, False, []).rpartition(ACTION)[2]
        return after.startswith(self.end_tokens(self.text_style.format))

    def end_tokens(self, calls: CallFormat) -> tuple[str, ...]:
        """Return the tokens with which the template may end an action."""
        return (*self.stops, *calls.end_tokens)

    @cached_property
    def _placement(self) -> ToolPlacement:
        style = (self._named_styles or self._styles or [CallStyle()])[0]
        found = ToolPlacement.probe(self._render, style)
        return replace(found, tools_by_template=False) if self.tools_in == "system" else found

    @cached_property
    def _writes_system(self) -> bool:
        return writes_system(self._render)

    @property
    def _named_styles(self) -> list[CallStyle]:
        return [one for one in self._styles if self.tool_calls in ("auto", one.format.name)]

    @cached_property
    def _styles(self) -> list[CallStyle]:
        return styles(self._render, self.end_tokens)

    def _render(self, messages: list[Message], generate: bool, tools: list[dict[str, Any]]) -> str:
        more: dict[str, Any] = {"tools": tools} if tools else {}
        if self.date is not None:
            template = self.renderer.get_chat_template(tools=tools or None)
            more["chat_template"] = pinned_date(self.date) + template
        return self.renderer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **more, **self.options
        )


def _mark_for(messages: Sequence[Message]) -> str:
    """Return a placeholder of what an assistant says that messages do not hold."""
    mark, text = ACTION, json.dumps(messages, ensure_ascii=False)
    while mark in text:
        mark += "X"
    return mark


def _answering(message: Message, call: ToolCall) -> Message:
    """Return a tool's result under the id and name of the call that it answers."""
    return {**message, "tool_call_id": call.id, "name": message.get("name") or call.name}
