"""Captures what an agent samples in one episode, token by token.

    request -> chat_prompt | text_prompt -> Prompt -> (generation) -> record -> CapturedTurn

Ids are never made of text that was sampled: a request that extends what was said continues the same
ids. Nothing here knows processes or HTTP.

Finds what an agent's request continues, and makes its prompt.

A request whose messages begin with a conversation that is known continues the ids of its last
sampled answer; the messages after it are added as context. Where nothing sampled is a prefix of it,
its conversation is rendered as a whole. Pure.

The assistant message that an agent gets for sampled text, and how it may echo it. Pure.

Thinking in an action's text: what stands in `<think>` tags before the answer.

Ids are continued, so earlier thinking stays in the context, also where the chat template would
leave it out when it renders a conversation anew.
"""

import hashlib
import json
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from composer_mesh.rollouts.agent_messages import (
    CLOSE,
    OPEN,
    UnusableMessages,
    chained,
    digest,
    ended_key,
    message_keys,
    normalized,
    stopped_key,
    text_of,
)
from composer_mesh.rollouts.captured_turns import (
    CapturedPrompt,
    CapturedTrajectory,
    CapturedTurn,
    RawPrompts,
    TurnTree,
    received,
)
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.generation import GenerationResult, tokens_to_stop
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    malformed_call,
    parse_calls,
    text_before_calls,
)
from composer_mesh.rollouts.traces import Message, StopReason, Turn

MOST_FORMATS = 32
"""Maximum number of cached chat formats: one for each set of tools."""


class ToolFormats:
    """Chat formats of one tokenizer by tools; a conversation with a system message of its own gets
    none from the config. Thread-safe."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat, self._lock = chat, threading.Lock()
        self._known: OrderedDict[tuple[str, bool], ChatFormat] = OrderedDict()

    def of(self, tools: list[dict[str, Any]], own_system: bool) -> ChatFormat:
        key = (json.dumps(tools), own_system)
        with self._lock:
            if key not in self._known:
                self._check(tools)
                system = "" if own_system else self.chat.system
                self._known[key] = self.chat.with_tools(tools, system)
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
    ) -> CapturedPrompt:
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
        return CapturedPrompt(known, plain, context, ids, tools, path)

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


@dataclass(frozen=True)
class ThinkingStyle:
    """How a chat template treats thinking: apart from the answer, or as a part of its text."""

    separate: bool

    def split(self, text: str) -> tuple[str, str]:
        """Return the thinking and the answer of an action's text.

        An end of thinking inside a call is a part of the call.
        """
        said = text_before_calls(text)
        if not self.separate or not (said.lstrip().startswith(OPEN) or CLOSE in said):
            return "", text
        thinking = said.partition(CLOSE)[0]
        answer = text[len(thinking) :].removeprefix(CLOSE)
        return thinking.lstrip().removeprefix(OPEN).strip(), answer.lstrip()


def _separates(chat: ChatFormat) -> bool:
    """Whether the template reads `reasoning_content`, or drops thinking from a content."""
    question, mark = [{"role": "user", "content": "q"}], "COMPOSERMESHTHOUGHT"
    apart = {"role": "assistant", "content": "a", "reasoning_content": mark}
    inside = {"role": "assistant", "content": f"{OPEN}{mark}{CLOSE}a"}
    reads = chat.added_by(question, apart) or ""
    drops = chat.added_by(question, inside)
    return mark in reads or (drops is not None and mark not in drops)


ID_LENGTH = 9
"""Letters of a call's id: templates of Mistral models take no other length."""


@dataclass(frozen=True)
class CapturedReply:
    """An assistant message, with the keys of all forms in which a client may send it back."""

    message: Message
    keys: list[bytes]


def reply_to(text: str, style: ThinkingStyle, with_tools: bool, name: str) -> CapturedReply:
    """Convert an action's text to the message for the client; `name` makes ids of calls unique.

    A malformed call stays content.
    """
    malformed = malformed_call(text)
    thinking, answer = style.split(malformed.text if malformed else text)
    found = parse_calls(answer) if with_tools and malformed is None else ()
    calls = () if isinstance(found, MalformedCall) else found
    content = text_before_calls(answer).strip() if calls else answer
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [_wire_call(call, name, at) for at, call in enumerate(calls)]
    return CapturedReply(message, _keys(text, message))


def _keys(text: str, message: Message) -> list[bytes]:
    """Return the keys of a reply without its thinking, which comes first, as it was sent, and as
    its whole text."""
    sent, whole = message_keys(message), message_keys({"role": "assistant", "content": text})
    return list(dict.fromkeys([sent.plain, sent.exact, whole.exact, whole.plain]))


def _wire_call(call: ToolCall, name: str, index: int) -> dict[str, object]:
    hashed = hashlib.sha256(f"{name}:{index}".encode()).hexdigest()
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": hashed[:ID_LENGTH], "type": "function", "function": function}


@dataclass(frozen=True)
class CaptureFormat:
    """What the episodes of a policy have in common: its chat format, and its caches."""

    formats: ToolFormats
    style: ThinkingStyle
    vocabulary: int

    @classmethod
    def of(cls, chat: ChatFormat, vocabulary: int) -> "CaptureFormat":
        """Probe the chat template; ids are below `vocabulary`."""
        return cls(ToolFormats(chat), ThinkingStyle(_separates(chat)), vocabulary)

    @property
    def chat(self) -> ChatFormat:
        return self.formats.chat


@dataclass(frozen=True)
class StoppedText:
    """Sampled ids up to a stop string, and their text before it."""

    ids: list[int]
    text: str
    stopped: bool


class CapturedEpisode:
    """The conversations of one episode's agent, as a tree of sampled turns."""

    def __init__(self, format: CaptureFormat) -> None:
        self._format = format
        self._tree = TurnTree()
        self._conversations = Conversations(format.formats)
        self._raw = RawPrompts(format.chat, format.vocabulary)

    def chat_prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], stops: Sequence[str] = ()
    ) -> CapturedPrompt:
        """Return what a request with messages continues; raises UnusableMessages."""
        return self._conversations.prompt(messages, tools, stops)

    def text_prompt(self, given: str | list[int]) -> CapturedPrompt:
        """Return what a request with a text or ids continues; raises UnusableMessages."""
        return self._raw.prompt(given)

    def record_chat(
        self, prompt: CapturedPrompt, result: GenerationResult, stops: Sequence[str] = ()
    ) -> CapturedTurn:
        """Add a sampled answer to a request with messages."""
        cut = cut_at_stop(self._format.chat, result.token_ids, stops)
        chat = self._format.formats.of(prompt.tools, own_system=True)
        text = chat.readable(cut.text)
        reply = reply_to(text, self._format.style, bool(prompt.tools), result.request_id)
        turn = self._added(prompt, result, cut, reply.message)
        ended = [ended_key(reply.message["content"] or "")] if stops else []
        self._conversations.remember(turn, prompt.path, [*reply.keys, *ended])
        return turn

    def record_text(
        self,
        prompt: CapturedPrompt,
        given: str | list[int],
        result: GenerationResult,
        stops: Sequence[str] = (),
    ) -> CapturedTurn:
        """Add a sampled answer to a request with a text or ids."""
        cut = cut_at_stop(self._format.chat, result.token_ids, stops)
        turn = self._added(prompt, result, cut, {"role": "assistant", "content": cut.text})
        self._raw.remember(turn, given, cut.text)
        return turn

    def withdraw(self, turn: CapturedTurn) -> None:
        """Mark an answer as not received, unless the agent continued from it."""
        self._tree.withdraw(turn)

    def trajectories(self) -> list[CapturedTrajectory]:
        """Return one trajectory for each answer that the agent got and did not continue from."""
        return self._tree.trajectories()

    def _added(
        self, prompt: CapturedPrompt, result: GenerationResult, cut: StoppedText, answer: Message
    ) -> CapturedTurn:
        kept = len(cut.ids)
        # "stop" says that the last id is the stop token, which an answer that was cut here lacks.
        reason = "length" if cut.stopped else result.stop_reason
        logprobs, versions = result.logprobs[:kept], result.versions[:kept]
        turn = Turn(prompt.context_ids, cut.ids, logprobs, versions, reason)
        finish: StopReason = "stop" if cut.stopped else result.stop_reason
        captured = CapturedTurn(
            prompt.parent, turn, prompt.new_messages, answer, prompt.tools, finish
        )
        self._tree.add(captured)
        return captured


def cut_at_stop(chat: ChatFormat, ids: list[int], stops: Sequence[str]) -> StoppedText:
    """Return sampled ids up to the one that completes a stop string.

    They are what sampling with that stop string would have returned: later ids never influence
    earlier ones.
    """
    count = tokens_to_stop(stops, ids, chat.raw_text)
    text = chat.raw_text(ids[:count])
    if count is None:
        return StoppedText(ids, text, stopped=False)
    return StoppedText(
        ids[:count], text[: min(text.find(s) for s in stops if s in text)], stopped=True
    )
