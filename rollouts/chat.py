"""From chat messages to token ids, each text exactly once.

A conversation grows by ids: the first prompt, then after each action only what follows it. What
the policy sampled is never decoded and tokenized again. Content (questions, tool results, hints)
is untrusted: control tokens written inside it are encoded as plain text.
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
"""Rendered templates that are kept, and the pieces of them that are."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token: str

    def apply_chat_template(self, messages: list[Message], **options: Any) -> str: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def convert_tokens_to_ids(self, token: str) -> int: ...


class ChatTemplateError(ValueError):
    """The model's chat template cannot be used for growing a conversation by ids."""


@dataclass(frozen=True)
class ChatFormat:
    """Renders messages with a tokenizer's own chat template.

    `system` is put before every conversation when it is not empty.
    """

    tokenizer: Tokenizer
    tools: list[dict[str, Any]]
    system: str = ""

    @property
    def stop_id(self) -> int:
        """The id that ends an assistant turn."""
        return self.tokenizer.convert_tokens_to_ids(self.tokenizer.eos_token)

    def first_prompt(self, messages: list[Message]) -> list[int]:
        """Ids of the whole conversation so far, up to where the policy writes."""
        return self._render(self._opening(messages), generate=True)

    def continuation(self, messages: list[Message], closed: bool) -> list[int]:
        """Ids between an action and the next one.

        `closed` says that the action ended with the stop token; otherwise it is added here, as
        context that nobody sampled.
        """
        after = self._after_action(_marked(messages), generate=True)
        ids = self._encode(after, [str(m.get("content") or "") for m in messages])
        return ids if closed else [self.stop_id, *ids]

    def action(self, text: str) -> list[int]:
        """Ids of an assistant action that was written as text, with the stop token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.stop_id]

    def action_text(self, ids: list[int]) -> str:
        """The text of sampled ids, without the stop token."""
        kept = ids[:-1] if ids and ids[-1] == self.stop_id else ids
        return self.tokenizer.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def hint(self, text: str) -> list[int]:
        """Ids of a user message that holds a hint, to stand before a generation prompt."""
        return self._encode(self.hint_frame, [text])

    def content_tokens(self, text: str) -> int:
        """Ids that an untrusted text takes inside a message."""
        return len(self._plain(text))

    @property
    def frame_mark(self) -> str:
        """What stands in `hint_frame` for the hint's text."""
        return _mark(0)

    @cached_property
    def hint_frame(self) -> str:
        """A user message that follows another one, with a mark for its content.

        A template that lets only assistants follow users writes it as it does behind an assistant.
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
        """The text that one more message adds; None where the template refuses or rewrites."""
        try:
            before = self._text(messages, generate=False)
            after = self._text([*messages, message], generate=False)
        except TemplateError:
            return None
        return after[len(before) :] if after.startswith(before) else None

    @cached_property
    def generation_prompt(self) -> list[int]:
        """The ids that every context ends with before the policy writes."""
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
        """What the template writes behind an assistant turn that messages follow."""
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
        """Ids of a rendered template in which each content stands as a numbered mark."""
        spans = [(m.start(), m.end(), int(m[1])) for m in re.finditer(rf"{_MARK}(\d+)E", template)]
        ids: list[int] = []
        edges = [(0, 0, -1), *spans, (len(template), len(template), -1)]
        for (_, end, _), (start, _, index) in pairwise(edges):
            ids += self._frame(template[end:start])
            if index >= 0:
                ids += self._plain(contents[index])
        return ids

    def _plain(self, text: str) -> list[int]:
        """Ids of untrusted text: no control token comes out of it, whatever it says."""
        pattern, ids = self._controls, list[int]()
        # One cut behind the first character of each control; what is left may begin another one.
        while pattern is not None and (found := pattern.search(text)):
            ids += self.tokenizer.encode(text[: found.start() + 1], add_special_tokens=False)
            text = text[found.start() + 1 :]
        return ids + self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _controls(self) -> re.Pattern[str] | None:
        """Finds the tokenizer's control tokens in a text, the longest first."""
        controls = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, controls))) if controls else None

    def _known(self, key: str, render: Callable[[], str]) -> str:
        """A rendered template: marks stand for contents, so few differ, and each is made once."""
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
        """Ids of what a template itself writes; each text is encoded once."""

        @lru_cache(maxsize=MOST_RENDERED)
        def encoded(text: str) -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))

        return encoded


def _mark(index: int) -> str:
    return f"{_MARK}{index}E"


def _marked(messages: list[Message]) -> list[Message]:
    """The messages with their contents replaced by marks; tool calls stay as they are."""
    marked = [dict(message) for message in messages]
    for index, message in enumerate(marked):
        if message.get("content"):
            message["content"] = _mark(index)
    return marked
