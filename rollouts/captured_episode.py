"""Captures what an agent samples in one episode, token by token.

    request -> chat_prompt | text_prompt -> Prompt -> (generation) -> record -> CapturedTurn

Ids are never made of text that was sampled: a request that extends what was said continues the same
ids. Nothing here knows processes or HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.agent_messages import ended_key
from composer_mesh.rollouts.agent_prompts import Conversations, ToolFormats
from composer_mesh.rollouts.agent_replies import reply_to
from composer_mesh.rollouts.captured_turns import (
    CapturedTrajectory,
    CapturedTurn,
    Prompt,
    TurnTree,
)
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationResult
from composer_mesh.rollouts.raw_prompts import RawPrompts
from composer_mesh.rollouts.stop_texts import tokens_to_stop
from composer_mesh.rollouts.thinking import ThinkingStyle
from composer_mesh.rollouts.traces import Message, StopReason, Turn


@dataclass(frozen=True)
class CaptureFormat:
    """What the episodes of a policy have in common: its chat format, and its caches."""

    formats: ToolFormats
    style: ThinkingStyle
    vocabulary: int

    @classmethod
    def of(cls, chat: ChatFormat, vocabulary: int) -> "CaptureFormat":
        """Probe the chat template; ids are below `vocabulary`."""
        return cls(ToolFormats(chat), ThinkingStyle.of(chat), vocabulary)

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

    @property
    def sampled(self) -> int:
        """The number of turns that were recorded."""
        return len(self._tree)

    def chat_prompt(
        self, messages: list[Message], tools: list[dict[str, Any]], stops: Sequence[str] = ()
    ) -> Prompt:
        """Return what a request with messages continues; raises UnusableMessages."""
        return self._conversations.prompt(messages, tools, stops)

    def text_prompt(self, given: str | list[int]) -> Prompt:
        """Return what a request with a text or ids continues; raises UnusableMessages."""
        return self._raw.prompt(given)

    def record_chat(
        self, prompt: Prompt, result: GenerationResult, stops: Sequence[str] = ()
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
        prompt: Prompt,
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
        """Mark an answer as not received, unless the agent went on from it."""
        self._tree.withdraw(turn)

    def trajectories(self) -> list[CapturedTrajectory]:
        """Return one trajectory for each answer that the agent got and did not go on from."""
        return self._tree.trajectories()

    def _added(
        self, prompt: Prompt, result: GenerationResult, cut: StoppedText, answer: Message
    ) -> CapturedTurn:
        kept = len(cut.ids)
        # "stop" says that the last id is the stop token, which an answer that was cut here lacks.
        reason = "length" if cut.stopped else result.stop_reason
        logprobs, versions = result.logprobs[:kept], result.versions[:kept]
        turn = Turn(prompt.context_ids, cut.ids, logprobs, versions, reason)
        finish: StopReason = "stop" if cut.stopped else result.stop_reason
        captured = CapturedTurn(prompt.parent, turn, prompt.asked, answer, prompt.tools, finish)
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
