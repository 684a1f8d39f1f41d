"""Conversion of chat messages to token ids that encodes each text exactly once.

A conversation grows by ids: the first prompt, then after each action only the messages that follow
it. Sampled ids are never decoded and tokenized again. Content (questions, tool results, hints) is
untrusted: control tokens in it are encoded as plain text.
"""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Protocol

from jinja2 import TemplateError

from composer_mesh.rollouts.call_formats.choosing import CallStyle
from composer_mesh.rollouts.call_formats.known import HERMES
from composer_mesh.rollouts.call_formats.port import Schemas
from composer_mesh.rollouts.chat_template import (
    MARK,
    MOST_RENDERED,
    ChatTemplate,
    ChatTemplateError,
)
from composer_mesh.rollouts.tool_calls import (
    OPEN,
    MalformedCall,
    ParsedAction,
    ToolCall,
    malformed_text,
    parse_calls,
    text_before_calls,
)
from composer_mesh.rollouts.traces import Message

LONG_TEXT = 1 << 16
"""Characters of messages from which on they are encoded in a thread: about 15 ms of a core."""


class Tokenizer(Protocol):
    """The part of the Hugging Face tokenizer interface that is used."""

    @property
    def eos_token(self) -> str: ...

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def __len__(self) -> int: ...

    def convert_tokens_to_ids(self, token: str) -> int: ...


@dataclass(frozen=True)
class ChatFormat:
    """Renders messages with the tokenizer's own chat template, and reads what a policy writes.

    A non-empty `system` is prepended to every conversation as the system message. `stops` are
    tokens that end an action besides the tokenizer's own; `tool_calls` names a format of calls, or
    "auto"; `options` are given to the template; `tools_in` is where tools are written: "template",
    "system" or "auto".
    """

    tokenizer: Tokenizer
    tools: list[dict[str, Any]]
    system: str = ""
    stops: tuple[str, ...] = ()
    tool_calls: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    tools_in: str = "auto"

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which renders texts."""
        stops = tuple(dict.fromkeys([self.tokenizer.eos_token, *self.stops]))
        return ChatTemplate(self.tokenizer, stops, self.options, self.tool_calls, self.tools_in)

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
        return self._render(self._opening(messages), generate=True)

    def continuation(self, messages: list[Message], action: Sequence[int]) -> list[int]:
        """Return the ids between an action, given by its ids, and the next one.

        They begin with what ends the action, unless it was sampled. A stop token that was sampled
        in place of the template's stays as it is.
        """
        marked = _marked(messages)
        calls = self._answered(messages, action)
        if calls:
            after = self.template.after_calls(calls, marked, generate=True)
        else:
            after = self.template.after_answer(marked, generate=True)
        ids = self._encode(after, [str(m.get("content") or "") for m in messages])
        if self.stop_of(action) is None:
            return ids
        return ids[1:] if action[-1] == ids[0] or self.template.ends_turns else ids

    def action(self, text: str) -> list[int]:
        """Return the ids of an assistant action given as text, with the stop token."""
        calls = parse_calls(text) if self.tools else ()
        made = () if isinstance(calls, MalformedCall) else calls
        if self.style.format != HERMES:
            before = text_before_calls(text) if made else text
            text = self.style.format.write(ParsedAction(before, made))
        return [*self.tokenizer.encode(text, add_special_tokens=False), self._end_id(made)]

    def action_text(self, ids: list[int]) -> str:
        """Return the readable text of sampled ids, without the stop token."""
        return self.readable(self.raw_text(ids))

    def readable(self, text: str) -> str:
        """Return what a policy wrote with its calls as `tool_calls` has them."""
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
        kept = ids if self.stop_of(ids) is None else ids[:-1]
        return self.tokenizer.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def hint(self, text: str) -> list[int]:
        """Return the ids of a user message with a hint, to insert before a generation prompt."""
        return self._encode(self.hint_frame, [text])

    def content_tokens(self, text: str) -> int:
        """Return the number of ids that an untrusted text takes inside a message."""
        return len(self._plain(text))

    def control_token(self, text: str) -> str | None:
        """Return a control token that a text holds, other than white space; None without one."""
        start, pattern = 0, self._controls
        while pattern is not None and (found := pattern.search(text, start)):
            if not found[0].isspace():
                return found[0]
            start = found.start() + 1
        return None

    @property
    def frame_mark(self) -> str:
        """Placeholder of the hint's text in `hint_frame`."""
        return _mark(0)

    @cached_property
    def hint_frame(self) -> str:
        """Rendered user message after another user message, with a placeholder for its content.

        If the template refuses two user messages in a row, the form after an assistant turn is
        used.
        """
        asked, hint = {"role": "user", "content": "q"}, {"role": "user", "content": _mark(0)}
        after_action = self._behind_end(self.template.after_answer([hint], generate=False))
        frame = self.added_by([asked], hint) or after_action.lstrip("\n")
        if frame.count(_mark(0)) != 1:
            raise ChatTemplateError(
                f"the chat template writes a user message {frame.count(_mark(0))} times, changed "
                "or not at all, so a hint has no place: use one that writes each content once"
            )
        return frame

    def added_by(self, messages: list[Message], message: Message) -> str | None:
        """Return the text that one more message adds; None if the template refuses or rewrites."""
        try:
            before = self._text(messages, generate=False)
            after = self._text([*messages, message], generate=False)
        except TemplateError:
            return None
        return after[len(before) :] if after.startswith(before) else None

    @cached_property
    def generation_prompt(self) -> list[int]:
        """The ids at the end of every context, after which the policy writes."""
        messages = [{"role": "user", "content": "q"}]
        before = self._text(messages, generate=False)
        after = self._text(messages, generate=True)
        if not after.startswith(before):
            raise ChatTemplateError(
                "the chat template changes earlier text when a generation prompt is added: use one "
                "that only appends"
            )
        return self.tokenizer.encode(after[len(before) :], add_special_tokens=False)

    def _behind_end(self, after: str) -> str:
        """Return a text without the token that ends an action, where it does not begin a turn."""
        ends = self.template.end_tokens(self.style.format) if self.template.ends_turns else ()
        return next((after.removeprefix(end) for end in ends if after.startswith(end)), after)

    def _opening(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}] * bool(self.system) + messages

    def _render(self, messages: list[Message], generate: bool) -> list[int]:
        marked = _marked(messages)
        key = json.dumps(["whole", marked, generate])
        text = self._known(key, lambda: self._text(marked, generate, tools=self.tools))
        return self._encode(text, [str(m.get("content") or "") for m in messages])

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
            results = [{"role": "tool", "content": _mark(at)} for at in range(len(calls))]
            after = self.template.after_calls(calls, results, generate=True)
        else:
            after = self.template.after_answer([{"role": "user", "content": _mark(0)}], True)
        stops = zip(self.stop_ids, self.template.stops, strict=True)
        return next((one for one, stop in stops if after.startswith(stop)), self.stop_ids[0])

    @cached_property
    def _schemas(self) -> Schemas:
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: one.get("parameters") or {} for one in functions}

    def _text(self, messages: list[Message], generate: bool, **options: Any) -> str:
        return self.template.text(messages, generate, **options)

    def _encode(self, template: str, contents: list[str]) -> list[int]:
        """Encode a rendered template in which each content is a numbered placeholder."""
        spans = [(m.start(), m.end(), int(m[1])) for m in re.finditer(rf"{MARK}(\d+)E", template)]
        ids: list[int] = []
        edges = [(0, 0, -1), *spans, (len(template), len(template), -1)]
        for (_, end, _), (start, _, index) in pairwise(edges):
            ids += self._frame(template[end:start])
            if index >= 0:
                ids += self._plain(contents[index])
        return ids

    def _plain(self, text: str) -> list[int]:
        """Encode untrusted text without ever producing a control token."""
        pattern, ids = self._controls, list[int]()
        # Cuts after the first character of each control token; the rest may contain another one.
        while pattern is not None and (found := pattern.search(text)):
            ids += self.tokenizer.encode(text[: found.start() + 1], add_special_tokens=False)
            text = text[found.start() + 1 :]
        return ids + self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _controls(self) -> re.Pattern[str] | None:
        """Pattern of the tokenizer's control tokens, longest first."""
        controls = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, controls))) if controls else None

    def _known(self, key: str, render: Callable[[], str]) -> str:
        """Return a rendered template, cached; few differ, as contents are placeholders."""
        if (text := self._rendered.get(key)) is None:
            if len(self._rendered) >= MOST_RENDERED:
                self._rendered.clear()
            text = self._rendered[key] = render()
        return text

    @cached_property
    def _rendered(self) -> dict[str, str]:
        return {}

    @cached_property
    def _frame(self) -> Callable[[str], tuple[int, ...]]:
        """Cached encoding of texts that the template itself writes."""

        @lru_cache(maxsize=MOST_RENDERED)
        def encoded(text: str) -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))

        return encoded


async def encoded(messages: Sequence[Message], encode: Callable[[], list[int]]) -> list[int]:
    """Return the ids that `encode` makes of messages; event loops go on while long ones are."""
    if sum(len(str(message.get("content") or "")) for message in messages) < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)


def _mark(index: int) -> str:
    return f"{MARK}{index}E"


def _marked(messages: list[Message]) -> list[Message]:
    """Replace the messages' contents by placeholders; tool calls stay unmodified."""
    marked = [dict(message) for message in messages]
    for index, message in enumerate(marked):
        if message.get("content"):
            message["content"] = _mark(index)
    return marked
