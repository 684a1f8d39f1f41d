"""Episodes of a Harbor task that a harness plays in a real box, by scripted answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.plugins.harbor.harness_agent import HarnessAgent
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message, Trace
from composer_mesh.tasks.running import RunningEpisode


@dataclass
class LocalEnvironments:
    """Sessions of a task in this process, as the port that workflows are played against."""

    task: HarborTask
    sessions: dict[str, RunningEpisode] = field(default_factory=dict)

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        return self.task.episode(episode.split, episode.index), None

    async def begin(self, session_id: str, episode: Episode, _agent: bytes = b"") -> list[Message]:
        running = self.sessions[session_id] = RunningEpisode(self.task, episode)
        return await running.begin()

    async def record(self, session_id: str, answer: bytes) -> None:
        """Record nothing: nobody dies here."""

    def sent(self, session_id: str, answer: str, received: bool) -> None:
        """Record nothing: nobody dies here."""

    async def step(
        self, session_id: str, text: str, _turn: object = None, again: bool = False
    ) -> StepResult:
        assert not again
        return await self.sessions[session_id].step(text)

    async def finish(self, session_id: str) -> Outcome:
        try:
            return await self.sessions[session_id].outcome()
        finally:
            await self.sessions.pop(session_id).close()

    def abandon(self, session_id: str) -> None:
        """Leave the session to `close`."""

    async def close(self) -> None:
        """End what was abandoned."""
        for one in self.sessions.values():
            await one.close()


async def harness_trace(
    task: HarborTask, generation: ScriptedGeneration, chat: ChatFormat, **options: Any
) -> Trace:
    """Play the first episode of a task by a harness; return its trace."""
    environments = LocalEnvironments(task)
    agent = HarnessAgent(**options)
    player = WorkflowPlayer(agent, generation, environments, chat, 300.0)  # type: ignore[arg-type]
    sample = a_sample(max_context=200_000, max_new_tokens=1000)
    try:
        return (await player.play(sample, "session")).trace
    finally:
        await player.close()
        await environments.close()
