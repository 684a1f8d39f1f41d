"""Encodes what a chat template rendered, so that nothing inside a message becomes a control token.

A rendering is encoded as a whole, which gives the ids that `apply_chat_template` does. Where a
message holds the text of a control token, the template is given a stand-in for its first character;
the rendering then shows where it is, and is cut inside of it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol

from composer_mesh.rollouts.agent_messages import CLOSE, OPEN, text_of
from composer_mesh.rollouts.traces import Message

if TYPE_CHECKING:
    from tokenizers import AddedToken

PRIVATE = range(0xF0000, 0x10FFFE)
"""Characters without a meaning, from which stand-ins are taken."""

UNKNOWN = "\U00013000\U00010380\U0001d200"
"""Letters that no vocabulary holds: they become bytes, or the token of unknown text."""

OURS = frozenset(
    {OPEN, CLOSE, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"}
)
"""Tags of thinking, calls and results, which are written where a template has none."""

StandIns = Mapping[int, str]
"""The character that each stand-in stands for, as `str.translate` takes it."""

Change = Callable[[str, tuple[str, ...]], str]
"""Returns a text in place of another one, which may hold the given control tokens."""


class ChatTemplateError(ValueError):
    """The model's chat template cannot extend a conversation by ids."""


class TextEncoder(Protocol):
    """The part of the Hugging Face tokenizer interface that encodes texts."""

    @property
    def chat_template(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def encode(self, text: str, **options: Any) -> list[int]: ...


def control_tokens(tokenizer: TextEncoder) -> dict[int, AddedToken]:
    """Return the added tokens that order a conversation, by their ids.

    They are those that are special, that the chat template or we write, or that begin with `<|`.
    Others, such as runs of spaces or HTML tags, are ordinary text.
    """
    written = str(tokenizer.chat_template)
    return {
        index: token
        for index, token in tokenizer.added_tokens_decoder.items()
        if (text := token.content).strip()
        and (token.special or text in OURS or text in written or text.startswith(("<|", "<｜")))
    }


class ControlTokens:
    """The control tokens of a tokenizer, and how untrusted text is kept from being any."""

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._tokenizer = tokenizer
        tokens = control_tokens(tokenizer)
        known = self._known = [token.content for token in tokens.values()]
        longest_first = sorted(known, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, known), default=0)
        self._beginnings = {one[:end] for one in known for end in range(1, len(one))}
        self._ends = {one[start:] for one in known for start in range(1, len(one))}
        unknown = set(self._encoded(UNKNOWN))
        self._normalized = {
            index: token.content
            for index, token in tokens.items()
            if token.normalized and index not in unknown
        }

    def first_in(self, text: str) -> str | None:
        """Return the first control token that a text holds; None without one."""
        found = self._pattern.search(text)
        return found[0] if found else None

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], StandIns]:
        """Return messages with contents as one text, and stand-ins in place of the first characters
        of control tokens.

        The tags of thinking stay in what an assistant says: templates read them there.
        """
        plain = [_with_text(message) for message in messages]
        places, used = dict[tuple[str, tuple[str, ...]], set[int]](), set[str]()

        def find(text: str, kept: tuple[str, ...]) -> str:
            places[text, kept] = self._places(text, kept)
            used.update(text)
            return text

        for message in plain:
            _changed(message, find)
        firsts = sorted({text[at] for (text, _), found in places.items() for at in found})
        if not firsts:
            return plain, {}
        free = (chr(code) for code in PRIVATE if chr(code) not in used)
        stand_ins = dict(zip(firsts, islice(free, len(firsts)), strict=True))

        def hidden(text: str, kept: tuple[str, ...]) -> str:
            letters = list(text)
            for at in places[text, kept]:
                letters[at] = stand_ins[letters[at]]
            return "".join(letters)

        replaced = [_changed(message, hidden) for message in plain]
        return replaced, {ord(stand_in): first for first, stand_in in stand_ins.items()}

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """Return the ids of a rendering of hidden messages; raises `ChatTemplateError` where they
        have more control tokens than the template wrote."""
        hidden = [at for at, c in enumerate(rendered) if ord(c) in stand_ins] if stand_ins else []
        text = rendered.translate(stand_ins)
        cuts, written, at = [0], list[str](), 0
        while found := self._pattern.search(text, at):
            begin, at = found.span()
            inside = bisect_left(hidden, begin)
            if inside < len(hidden) and hidden[inside] < at:
                at = begin + 1
                cuts.append(at)
            else:
                written.append(found[0])
        pieces = [self._encoded(text[a:b]) for a, b in pairwise([*cuts, len(text)])]
        ids = [one for piece in pieces for one in piece]
        resembling = Counter(self._normalized[one] for one in ids if one in self._normalized)
        if not resembling <= Counter(written):
            raise ChatTemplateError(
                "the tokenizer makes a control token of text that only resembles one, so a message "
                "could control the conversation: use a tokenizer whose added tokens are not "
                'normalized ("normalized": false)'
            )
        return ids

    def encode_behind(self, before: str, rendered: str, stand_ins: StandIns) -> list[int]:
        """Return the ids of a rendering behind a text, which are those of both less the text's.

        Where one token spans the end of the text, they are the ids of the rendering alone.
        """
        head = self.encode(before, {})
        both = self.encode(before + rendered, stand_ins)
        return both[len(head) :] if both[: len(head)] == head else self.encode(rendered, stand_ins)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _places(self, text: str, kept: tuple[str, ...]) -> set[int]:
        """Return where control tokens begin, and where text of a template could complete one."""
        places, at = set[int](), 0
        while found := self._pattern.search(text, at):
            at = found.start() + 1
            if found[0] not in kept:
                places.add(found.start())
        inner = text.strip()
        lengths = range(1, min(self._longest, len(inner) + 1))
        within = 0 < len(inner) < self._longest and any(inner in one for one in self._known)
        if within or any(inner[:length] in self._ends for length in lengths):
            places.add(text.index(inner))
        if any(inner[-length:] in self._beginnings for length in lengths):
            places.add(len(text.rstrip()) - 1)
        return places


def _with_text(message: Message) -> Message:
    """Return a message whose content in parts is one text."""
    content = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list) else message


def _changed(message: Message, change: Change) -> Message:
    """Return a message with its texts changed: all but its role."""
    kept = (OPEN, CLOSE) if message.get("role") == "assistant" else ()
    found = {
        key: change(value, kept if key == "content" else ())
        if isinstance(value, str) and key != "role"
        else value
        for key, value in message.items()
    }
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_changed_call(call, change) for call in calls]
    return found


def _changed_call(call: dict[str, Any], change: Change) -> dict[str, Any]:
    function = call["function"]
    name = change(function["name"], ())
    arguments = _changed_arguments(function.get("arguments"), change)
    found = {**call, "function": {**function, "name": name, "arguments": arguments}}
    return found | ({"id": change(call["id"], ())} if isinstance(call.get("id"), str) else {})


def _changed_arguments(arguments: Any, change: Change) -> Any:
    """Return arguments with their texts changed, also where they are JSON that escapes them."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return change(arguments, ())
    try:
        changed = _changed_value(parsed, change)
    except RecursionError:
        raise ChatTemplateError(
            "the arguments of a call are nested too deeply to be rendered: send fewer levels"
        ) from None
    if changed == parsed:
        return arguments
    return json.dumps(changed, ensure_ascii=False) if isinstance(arguments, str) else changed


def _changed_value(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value, ())
    if isinstance(value, dict):
        return {change(key, ()): _changed_value(inner, change) for key, inner in value.items()}
    return [_changed_value(one, change) for one in value] if isinstance(value, list) else value
