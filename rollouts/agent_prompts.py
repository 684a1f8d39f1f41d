"""Finds what an agent's request continues, and makes its prompt.

A request whose messages begin with a conversation that is known continues the ids of its last
sampled answer; the messages after it are added as context. Where nothing sampled is a prefix of it,
its conversation is rendered as a whole. Pure.
"""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from composer_mesh.rollouts.agent_messages import (
    UnusableMessages,
    chained,
    digest,
    message_keys,
    normalized,
    stopped_key,
    text_of,
)
from composer_mesh.rollouts.captured_turns import CapturedTurn, Prompt, received
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.traces import Message

MOST_FORMATS = 32
"""Maximum number of cached chat formats: one for each set of tools."""


class ToolFormats:
    """Chat formats of one tokenizer by tools; a conversation with a system message of its own gets
    none from the config."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._known: OrderedDict[tuple[str, bool], ChatFormat] = OrderedDict()

    def of(self, tools: list[dict[str, Any]], own_system: bool) -> ChatFormat:
        key = (json.dumps(tools), own_system)
        if key not in self._known:
            self._check(tools)
            system = "" if own_system else self.chat.system
            self._known[key] = replace(self.chat, tools=tools, system=system)
            if len(self._known) > MOST_FORMATS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _check(self, tools: list[dict[str, Any]]) -> None:
        """Refuse control tokens, which the template would write into the prompt as such."""
        found = self.chat.control_token(json.dumps(tools, ensure_ascii=False))
        if found is not None:
            raise UnusableMessages(f"the tools hold the control token {found!r}: leave it out")


class Conversations:
    """The sampled answers of one episode by the messages before them."""

    def __init__(self, formats: ToolFormats) -> None:
        self._formats = formats
        self._answers: defaultdict[bytes, list[CapturedTurn]] = defaultdict(list)

    def prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], stops: Sequence[str]
    ) -> Prompt:
        """Return the prompt of a request; raises UnusableMessages."""
        known, rest, path = self._longest_known(messages, digest(tools), stops)
        plain = [normalized(message) for message in rest]
        own_system = known is not None or any(m["role"] == "system" for m in plain)
        chat = self._formats.of(tools, own_system)
        given = [_for_template(chat, message) for message in plain]
        try:
            context = _continued(chat, known, given) if known else chat.first_prompt(given)
        except (TemplateError, ChatTemplateError) as error:
            raise UnusableMessages(f"the chat template refuses the messages ({error})") from None
        ids = [*known.token_ids(), *context] if known else context
        return Prompt(known, plain, context, ids, tools, path)

    def remember(self, turn: CapturedTurn, before: bytes, keys: list[bytes]) -> None:
        """Know an answer by each form in which a client may send it back."""
        turn.path = chained(before, keys[0])
        for key in keys:
            self._answers[chained(before, key)].append(turn)

    def _longest_known(
        self, messages: list[Message], path: bytes, stops: Sequence[str]
    ) -> tuple[CapturedTurn | None, list[Message], bytes]:
        """Return the last sampled answer that the messages quote, the messages after it, and the
        key of the whole conversation."""
        known, after = None, 0
        for index, message in enumerate(messages, 1):
            keys = message_keys(message)
            found = self._received(path, keys.exact) or self._stopped(path, message, stops)
            if found is not None:
                known, after, path = found, index, found.path
            else:
                path = chained(path, keys.plain)
        return known, messages[after:], path

    def _received(self, path: bytes, key: bytes) -> CapturedTurn | None:
        return received(self._answers.get(chained(path, key), []))

    def _stopped(self, path: bytes, message: Message, stops: Sequence[str]) -> CapturedTurn | None:
        """Return the answer to which a client has added a stop string and more."""
        if message["role"] != "assistant":
            return None
        key = stopped_key(text_of(message.get("content")), stops)
        return None if key is None else self._received(path, key)


def _continued(chat: ChatFormat, known: CapturedTurn, messages: list[Message]) -> list[int]:
    return chat.continuation(messages, known.turn.action_ids)


def _for_template(chat: ChatFormat, message: Message) -> Message:
    """Refuse names that hold control tokens; contents and arguments are encoded as plain text."""
    calls = message.get("tool_calls", [])
    names = [message.get("name", ""), message.get("tool_call_id", "")]
    names += [text for call in calls for text in (call["id"], call["function"]["name"])]
    for name in names:
        if (found := chat.control_token(name)) is not None:
            raise UnusableMessages(f"a name or id holds the control token {found!r}: use another")
    return message
