"""Conversion of chat messages to token ids: those that `apply_chat_template` gives, grown by turns.

A conversation grows by ids: the first prompt, then after each action only the messages that follow
it. Sampled ids are never decoded and tokenized again. Content (questions, tool results, hints) is
untrusted: control tokens in it are encoded as plain text.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

from jinja2 import TemplateError

from composer_mesh.rollouts.call_formats.choosing import HERMES, CallStyle
from composer_mesh.rollouts.call_formats.port import Schemas
from composer_mesh.rollouts.chat_template import ACTION, QUESTION, ChatTemplate
from composer_mesh.rollouts.control_tokens import ChatTemplateError, ControlTokens
from composer_mesh.rollouts.control_tokens import TextEncoder as Encoder
from composer_mesh.rollouts.tool_calls import (
    OPEN,
    THINKING,
    THINKING_ENDS,
    MalformedCall,
    ParsedAction,
    ToolCall,
    malformed_text,
    parse_calls,
    text_before_calls,
)
from composer_mesh.rollouts.traces import Message

T = TypeVar("T")

NO_THOUGHT = f"\n{THINKING_ENDS}\n\n"
"""Closes a thought that a generation prompt has opened."""

CONTENTS = ("0", "z")
"""Contents that have no token in common, to find what a template writes around them."""
LONG_TEXT = 1 << 16
"""Characters of messages from which on they are encoded in a thread: about 15 ms of a core."""


class Tokenizer(Encoder, Protocol):
    """The part of the Hugging Face tokenizer interface that is used."""

    @property
    def eos_token(self) -> str: ...

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str: ...

    def get_chat_template(self, *, tools: list[dict[str, Any]] | None = None) -> str: ...

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def __len__(self) -> int: ...

    def convert_tokens_to_ids(self, token: str) -> int: ...


@dataclass(frozen=True)
class ChatFormat:
    """Renders messages with the tokenizer's own chat template, and reads what a policy writes.

    A non-empty `system` is prepended to every conversation as the system message. `stops` are
    tokens that end an action besides the tokenizer's own; `tool_calls` names a format of calls, or
    "auto"; `options` are given to the template; `tools_in` is where tools are written: "template",
    "system" or "auto"; `date` is what the template takes for today's, such as 2026-01-31.
    """

    tokenizer: Tokenizer
    tools: list[dict[str, Any]]
    system: str = ""
    stops: tuple[str, ...] = ()
    tool_calls: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    tools_in: str = "auto"
    date: str | None = None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which renders texts."""
        stops = tuple(dict.fromkeys([self.tokenizer.eos_token, *self.stops]))
        own = self.options, self.tool_calls, self.tools_in, self.date
        return ChatTemplate(self.tokenizer, stops, *own)

    @cached_property
    def controls(self) -> ControlTokens:
        """The tokens that order a conversation, which no message may hold."""
        return ControlTokens(self.tokenizer)

    def with_tools(self, tools: list[dict[str, Any]], system: str) -> Self:
        """Return the format with other tools; it keeps what was found out about the template."""
        found = replace(self, tools=tools, system=system)
        for name in ("template", "controls", "_prompt_text", "_lead"):
            found.__dict__[name] = getattr(self, name)
        return found

    @cached_property
    def stop_ids(self) -> list[int]:
        """The token ids that end an action; the tokenizer's own comes first."""
        return [self.tokenizer.convert_tokens_to_ids(stop) for stop in self.template.stops]

    @cached_property
    def style(self) -> CallStyle:
        """How actions are written: with calls where there are tools."""
        return self.template.call_style if self.tools else self.template.text_style

    @property
    def described(self) -> str:
        """Where its conversations have tools, calls and results, in words."""
        return str(self.template.placement) if self.tools else "no tools"

    def stop_of(self, action: Sequence[int]) -> str | None:
        """Return the stop token that an action ends with; None if it was cut."""
        stops = dict(zip(self.stop_ids, self.template.stops, strict=True))
        return stops.get(action[-1]) if action else None

    def first_prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of the conversation so far, including the generation prompt."""
        system = [{"role": "system", "content": self.system}] * bool(self.system)
        hidden, stand_ins = self.controls.hide(system + messages)
        text = self.template.text(hidden, generate=True, tools=self.tools)
        return self.controls.encode(text, stand_ins)

    def continuation(self, messages: list[Message], action: Sequence[int]) -> list[int]:
        """Return the ids between an action, given by its ids, and the next one.

        They begin with what ends the action, unless it was sampled. A stop token that was sampled
        in place of the template's stays as it is.
        """
        hidden, stand_ins = self.controls.hide(messages)
        calls = self._answered(messages, action)
        if calls:
            after = self.template.after_calls(calls, hidden, generate=True)
        else:
            after = self.template.after_answer(hidden, generate=True)
        ids = self.controls.encode(after, stand_ins)
        if self.stop_of(action) is None:
            return ids
        return ids[1:] if action[-1] == ids[0] or self.template.ends_turns else ids

    def contents(
        self, messages: list[Message], action: Sequence[int], ids: Sequence[int]
    ) -> list[range]:
        """Return where the content of each message is among the ids of a continuation.

        It is what lies between the ids that do not depend on it. Of ids that this format would not
        have made, such as an agent's own, the template's part is not known and counts as content.
        """
        found = []
        for place, message in enumerate(messages):
            before, after = messages[:place], messages[place + 1 :]
            others = [
                self.continuation([*before, {**message, "content": text}, *after], action)
                for text in CONTENTS
            ]
            head = _common([ids, *others])
            tail = _common([row[::-1] for row in (ids[head:], *(one[head:] for one in others))])
            found.append(range(head, len(ids) - tail))
        return found

    def action(self, text: str) -> list[int]:
        """Return the ids of an assistant action given as text, with the stop token.

        Where the generation prompt opens a thought, the action closes it: behind the thinking that
        the text has, or at once.
        """
        text = self._closing_thought(text) if self.opens_thought else text
        calls = parse_calls(text) if self.tools else ()
        made = () if isinstance(calls, MalformedCall) else calls
        if self.style.format != HERMES:
            before = text_before_calls(text) if made else text
            text = self.style.format.write(ParsedAction(before, made))
        return [*self._spoken(text), self._end_id(made)]

    def action_text(self, ids: list[int]) -> str:
        """Return the readable text of sampled ids, without the stop token."""
        return self.readable(self.raw_text(ids))

    def readable(self, text: str) -> str:
        """Return what a policy wrote with its calls as `tool_calls` has them.

        It begins with the tag of a thought that its prompt opened, so that readers know of it.
        """
        text = f"{self._opened_thought}{text}"
        if self.style.format == HERMES:
            return text
        found = self.style.format.read(text, self._schemas)
        if isinstance(found, ParsedAction):
            found = self._without_controls(text, found)
        if isinstance(found, MalformedCall):
            return malformed_text(text, found.reason)
        written = HERMES.write(found)
        if parse_calls(written) != found.calls:
            return malformed_text(text, f"a call is not written with {OPEN} here")
        return written

    def raw_text(self, ids: list[int]) -> str:
        """Return sampled ids as the policy wrote them, without the stop token."""
        return self._decoded(ids if self.stop_of(ids) is None else ids[:-1])

    def hint(self, text: str) -> list[int]:
        """Return the ids of a user message with a hint, to insert before a generation prompt."""
        (hint,), stand_ins = self.controls.hide([{"role": "user", "content": text}])
        before = self.template.text([QUESTION], generate=False)
        return self.controls.encode_behind(before, self.hint_text(hint), stand_ins)

    def hint_text(self, hint: Message) -> str:
        """Return a user message as it is rendered after another user message.

        If the template refuses two user messages in a row, the form after an assistant turn is
        used.
        """
        after_action = self._behind_end(self.template.after_answer([hint], generate=False))
        return self.added_by([QUESTION], hint) or after_action.lstrip("\n")

    def content_tokens(self, text: str) -> int:
        """Return the number of ids that an untrusted text takes inside a message."""
        (hidden,), stand_ins = self.controls.hide([{"role": "user", "content": text}])
        return len(self.controls.encode(hidden["content"], stand_ins))

    def control_token(self, text: str) -> str | None:
        """Return a control token that a text holds; None without one."""
        return self.controls.first_in(text)

    def added_by(self, messages: list[Message], message: Message) -> str | None:
        """Return the text that one more message adds; None if the template refuses or rewrites."""
        try:
            before = self.template.text(messages, generate=False)
            after = self.template.text([*messages, message], generate=False)
        except TemplateError:
            return None
        return after[len(before) :] if after.startswith(before) else None

    @cached_property
    def generation_prompt(self) -> list[int]:
        """The ids at the end of every context, after which the policy writes."""
        return self.controls.encode(self._prompt_text, {})

    @cached_property
    def _prompt_text(self) -> str:
        before = self.template.text([QUESTION], generate=False)
        after = self.template.text([QUESTION], generate=True)
        if not after.startswith(before):
            raise ChatTemplateError(
                "the chat template changes earlier text when a generation prompt is added: use one "
                "that only appends"
            )
        return after[len(before) :]

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the generation prompt opens a thought, so that actions begin inside of it."""
        return bool(self._opened_thought)

    @cached_property
    def _opened_thought(self) -> str:
        """The tag of thinking at the end of the generation prompt; empty without one."""
        _, tag, space = self._prompt_text.rpartition(THINKING)
        return tag + space if tag and not space.strip() else ""

    def _closing_thought(self, text: str) -> str:
        """Return an action's text as it follows a prompt that has opened its thought."""
        spoken = text.lstrip()
        if spoken.startswith(THINKING):
            thought = spoken.removeprefix(THINKING)
            return thought.removeprefix("\n") if self._prompt_text.endswith("\n") else thought
        return text if THINKING_ENDS in text_before_calls(text) else f"{NO_THOUGHT}{text}"

    def _spoken(self, text: str) -> list[int]:
        """Return the ids of an action's text behind the template's prompt.

        Where they are decoded otherwise than those of the text alone, these.
        """
        alone = self.controls.encode(text, {})
        before = self.template.text([QUESTION], generate=True)
        for lead in dict.fromkeys((self._lead, "")):
            ids = self.controls.encode_behind(before, lead + text, {})
            if self._decoded(ids) == self._decoded(alone):
                return ids
        return alone

    @cached_property
    def _lead(self) -> str:
        """White space that the template writes between its prompt and an assistant's text."""
        before = self.template.text([QUESTION], generate=True)
        said = self.template.text(
            [QUESTION, {"role": "assistant", "content": ACTION}], generate=False
        )
        lead = said.partition(ACTION)[0].removeprefix(before)
        return lead if lead.isspace() else ""

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _behind_end(self, after: str) -> str:
        """Return a text without the token that ends an action, where it does not begin a turn."""
        ends = self.template.end_tokens(self.style.format) if self.template.ends_turns else ()
        return next((after.removeprefix(end) for end in ends if after.startswith(end)), after)

    def _answered(self, messages: list[Message], action: Sequence[int]) -> tuple[ToolCall, ...]:
        """Return the calls of an action whose results messages begin with."""
        answered = bool(messages) and messages[0]["role"] == "tool"
        if not answered or not self.tools or not self.style.by_template:
            return ()
        found = self.style.format.read(self.raw_text(list(action)), self._schemas)
        return found.calls if isinstance(found, ParsedAction) else ()

    def _without_controls(self, text: str, spoken: ParsedAction) -> ParsedAction | MalformedCall:
        """Refuse names that hold control tokens: templates write them behind the action."""
        for call in spoken.calls:
            if self.control_token(call.name) or self.control_token(call.id):
                return MalformedCall(text, "the name of a call holds a control token")
        return spoken

    def _end_id(self, calls: Sequence[ToolCall]) -> int:
        """Return the token that ends an action before its results, or before a remark."""
        if self.style.format == HERMES or len(self.stop_ids) == 1:
            return self.stop_ids[0]
        if calls and self.style.by_template:
            results = [{"role": "tool", "content": "r"} for _ in calls]
            after = self.template.after_calls(calls, results, generate=True)
        else:
            after = self.template.after_answer([QUESTION], True)
        stops = zip(self.stop_ids, self.template.stops, strict=True)
        return next((one for one, stop in stops if after.startswith(stop)), self.stop_ids[0])

    @cached_property
    def _schemas(self) -> Schemas:
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: one.get("parameters") or {} for one in functions}


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Return how many ids all rows begin with."""
    return next(
        (at for at, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1),
        min(map(len, rows)),
    )


async def encoded(messages: Sequence[Message], encode: Callable[[], T]) -> T:
    """Return what `encode` makes of messages; event loops continue while long ones are encoded."""
    if sum(len(str(message.get("content") or "")) for message in messages) < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)
