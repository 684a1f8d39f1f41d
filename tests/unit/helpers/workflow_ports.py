"""A scripted policy and a task's own sessions, as the ports that workflows are played against."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from composer_mesh import Episode, Outcome, SyncSession
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.toolbox import ToolboxTask

SAMPLING = Sampling(1.0, 60, 2000, 7)


@dataclass
class Ports:
    """A scripted policy, and the task's own sessions."""

    task: ToolboxTask
    chat: ChatFormat
    answer: Callable[[int], str]
    requests: list[GenerationRequest] = field(default_factory=list)
    sessions: dict[str, SyncSession] = field(default_factory=dict)
    abandoned: list[str] = field(default_factory=list)

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        self.requests.append(request)
        ids = self.chat.action(self.answer(len(self.requests) - 1))[: request.max_new_tokens]
        await asyncio.sleep(0)
        return GenerationResult(request.request_id, ids, [-1.0] * len(ids), [3] * len(ids), "stop")

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        whole = self.task.episode(episode.split, episode.index)
        return whole, self.task.verified_answer(whole)

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        won = messages[-1]["content"] == f"Answer: {self.task.verified_answer(episode)}"
        return Outcome(messages, float(won), won, {"solved": float(won)})

    async def begin(self, session_id: str, episode: Episode, _agent: bytes = b"") -> list[Message]:
        self.sessions[session_id] = SyncSession(self.task, episode)
        return self.sessions[session_id].messages

    async def step(
        self, session_id: str, text: str, _turn: object = None, again: bool = False
    ) -> StepResult:
        assert not again
        return self.sessions[session_id].step(text)

    async def record(self, session_id: str, answer: bytes) -> None:
        """Record nothing: nobody dies here."""

    def sent(self, session_id: str, answer: str, received: bool) -> None:
        """Record nothing: nobody dies here."""

    async def finish(self, session_id: str) -> Outcome:
        return self.sessions.pop(session_id).outcome()

    def abandon(self, session_id: str) -> None:
        self.sessions.pop(session_id)
        self.abandoned.append(session_id)


def sample(toolbox: ToolboxTask, number: int = 0) -> Sample:
    return Sample(toolbox.pick("train", 0), 0, number, SAMPLING)
