"""Conversion of chat messages to token ids that encodes each text exactly once.

A conversation grows by ids: the first prompt, then after each action only the messages that follow
it. Sampled ids are never decoded and tokenized again. Content (questions, tool results, hints) is
untrusted: control tokens in it are encoded as plain text.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Protocol

from jinja2 import TemplateError

from composer_mesh.rollouts.traces import Message

_MARK = "COMPOSERMESHMARK"

MOST_RENDERED = 1024
"""Maximum number of cached rendered templates, and of cached encoded template pieces."""


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


class ChatTemplateError(ValueError):
    """The model's chat template cannot extend a conversation by ids."""


@dataclass(frozen=True)
class ChatFormat:
    """Renders messages with the tokenizer's own chat template.

    A non-empty `system` is prepended to every conversation as the system message.
    """

    tokenizer: Tokenizer
    tools: list[dict[str, Any]]
    system: str = ""

    @property
    def stop_id(self) -> int:
        """The token id that ends an assistant turn."""
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.eos_token)

    def first_prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of the conversation so far, including the generation prompt."""
        return self._render(self._opening(messages), generate=True)

    def continuation(self, messages: list[Message], closed: bool) -> list[int]:
        """Return the ids between an action and the next one.

        `closed` means that the action ended with the stop token; otherwise the stop token is
        prepended here, as context that was not sampled.
        """
        after = self._after_action(_marked(messages), generate=True)
        ids = self._encode(after, [str(m.get("content") or "") for m in messages])
        return ids if closed else [self.stop_id, *ids]

    def action(self, text: str) -> list[int]:
        """Return the ids of an assistant action given as text, with the stop token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.stop_id]

    def action_text(self, ids: list[int]) -> str:
        """Return the text of sampled ids, without the stop token."""
        kept = ids[:-1] if ids and ids[-1] == self.stop_id else ids
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
        after_action = self._after_action([hint], generate=False)
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

    def _opening(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}] * bool(self.system) + messages

    def _render(self, messages: list[Message], generate: bool) -> list[int]:
        marked = _marked(messages)
        key = json.dumps(["whole", marked, generate])
        text = self._known(key, lambda: self._text(marked, generate, tools=self.tools))
        return self._encode(text, [str(m.get("content") or "") for m in messages])

    def _after_action(self, messages: list[Message], generate: bool) -> str:
        """Return what the template writes after an assistant turn that is followed by messages."""
        key = json.dumps(["after", messages, generate])
        return self._known(key, lambda: self._written_after(messages, generate))

    def _written_after(self, messages: list[Message], generate: bool) -> str:
        known = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _MARK}]
        text = self._text([*known, *messages], generate)
        _, found, after = text.rpartition(_MARK + self.tokenizer.eos_token)
        if not found:
            raise ChatTemplateError(
                f"the chat template does not end an assistant turn with {self.tokenizer.eos_token}"
                ": use a template that does, or set the tokenizer's eos_token to its end marker"
            )
        return after

    def _text(self, messages: list[Message], generate: bool, **options: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **options
        )

    def _encode(self, template: str, contents: list[str]) -> list[int]:
        """Encode a rendered template in which each content is a numbered placeholder."""
        spans = [(m.start(), m.end(), int(m[1])) for m in re.finditer(rf"{_MARK}(\d+)E", template)]
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


def _mark(index: int) -> str:
    return f"{_MARK}{index}E"


def _marked(messages: list[Message]) -> list[Message]:
    """Replace the messages' contents by placeholders; tool calls stay unmodified."""
    marked = [dict(message) for message in messages]
    for index, message in enumerate(marked):
        if message.get("content"):
            message["content"] = _mark(index)
    return marked
