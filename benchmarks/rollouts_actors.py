"""Generators and environments that only sleep, for `benchmarks/rollouts.py`."""

import asyncio
import os
import random
from typing import Any, ClassVar, cast

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.task_process.process import TaskProcess
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message

WORDS = ("the", "tool", "returned", "value", "count", "sum", "of", "orders", "42", "17", "error")


class SleepingGenerator(MeshActor):
    """Answers a request after a while with `tokens` ids that mean nothing."""

    kind: ClassVar[str] = "generator"

    @concurrent_endpoint
    async def load(self, sleep_s: float, tokens: int) -> None:
        """Set how long an answer takes and how many ids it has."""
        self._sleep_s, self._tokens = sleep_s, tokens

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Answer after between half and one and a half of the time."""
        rng = random.Random(request.seed)
        await asyncio.sleep(self._sleep_s * rng.uniform(0.5, 1.5))
        ids = [rng.randrange(100, 200) for _ in range(min(self._tokens, request.max_new_tokens))]
        logprobs = [-0.1234567] * len(ids)
        return GenerationResult(request.request_id, ids, logprobs, [0] * len(ids), "length")


class SleepingTask:
    """In place of a task process: sessions of a fixed number of turns, each answered after a while
    with a tool's result.

    `actions` counts the actions of all sessions.
    """

    fault = None

    def __init__(self, sleep_s: float, turns: int, words: int) -> None:
        self._sleep_s, self._last, self.pid = sleep_s, turns, os.getpid()
        self._result = " ".join(random.Random(0).choices(WORDS, k=words))
        self._turns: dict[str, int] = {}
        self.episodes: dict[str, Episode] = {}
        self.actions = 0

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint, as of a process."""
        return await getattr(self, endpoint)(*args)

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a session."""
        self._turns[session_id] = 0
        return [{"role": "user", "content": f"Episode {episode.index} {self._result}"}]

    async def step(self, session_id: str, text: str) -> StepResult:
        """Answer after a while; the last turn ends the episode."""
        await asyncio.sleep(self._sleep_s)
        self._turns[session_id] += 1
        self.actions += 1
        done = self._turns[session_id] >= self._last
        content = f"{len(text)} {self._result}"
        answer: list[Message] = [{"role": "tool", "content": content, "tool_call_id": "call_0"}]
        return StepResult(answer, done, None)

    async def finish(self, session_id: str) -> Outcome:
        """Close a session; a real one would return its conversation."""
        del self._turns[session_id]
        said: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "done"},
        ]
        return Outcome(said, 1.0, True)

    async def forget(self, session_id: str) -> None:
        """Drop an abandoned session."""
        self._turns.pop(session_id, None)

    async def close(self) -> None:
        """Do nothing: there is no process."""


class SleepingEnvironment(EnvironmentActor):
    """A run's environment actor, with its records of episodes, in front of a task that sleeps."""

    _task: SleepingTask | None = None

    @concurrent_endpoint
    async def load(self, sleep_s: float, turns: int, words: int) -> None:
        """Set how long a step takes, the turns of an episode and the words of a result."""
        self._task = SleepingTask(sleep_s, turns, words)
        self._process = cast(TaskProcess, self._task)

    def details(self) -> dict[str, Any]:
        return {"actions": 0 if self._task is None else self._task.actions}
