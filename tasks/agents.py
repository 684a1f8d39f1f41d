"""Workflows that play episodes by agents as they are: a function, or a program.

    class Mine(AgentWorkflow):
        async def solve(self, messages, agent):
            client = AsyncOpenAI(base_url=agent.base_url, api_key=agent.api_key)
            ...
            return "Answer: 5"

What the agent samples through its endpoint is captured token by token (docs/agents.md). What it
returns is its answer in a session of the task, whose rewards score all that it sampled.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Sequence

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.calls import Calls, in_a_thread
from composer_mesh.tasks.errors import TaskError, UnusableTask
from composer_mesh.tasks.workflow import Agent, Engine, Trajectory, Workflow

LONGEST_SHOWN = 500


class AgentFailed(TaskError):
    """An agent ended with an error, or without an answer."""


class AgentWorkflow(Workflow):
    """Plays an episode by an agent that asks an OpenAI-compatible endpoint."""

    async def solve(self, messages: list[Message], agent: Agent) -> str:
        """Return the agent's answer to the first messages of an episode."""
        raise NotImplementedError(f"{type(self).__name__} defines no solve(self, messages, agent)")

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        async with engine.environment() as session:
            async with engine.agent() as agent:
                answer = await self._answer(engine, session.messages, agent)
            await session.step(answer)
            outcome = await session.finish()
        return agent.trajectories(outcome.reward, success=outcome.success, rewards=outcome.rewards)

    async def _answer(self, engine: Engine, messages: list[Message], agent: Agent) -> str:
        return await self.solve(messages, agent)


class FunctionAgent(AgentWorkflow):
    """An agent that is a function: `function(messages, base_url, api_key)` returns its answer.

    It may be plain, which runs in a thread, or async.
    """

    def __init__(self, function: str) -> None:
        """`function` is an import path, as "my_module:solve"."""
        module, _, name = function.rpartition(":")
        try:
            self._function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UnusableTask(
                f"function is {function!r}, which cannot be imported ({error}): write "
                "my_module:my_function, in a folder of run.import_paths or installed"
            ) from error

    async def solve(self, messages: list[Message], agent: Agent) -> str:
        found = await Calls(in_a_thread)(
            "the agent's function", self._function, messages, agent.base_url, agent.api_key
        )
        return str(found)


class CommandAgent(AgentWorkflow):
    """An agent that is a program: it reads the first messages as JSON and prints its answer.

    Its environment has OPENAI_BASE_URL and OPENAI_API_KEY. A status other than 0 fails the attempt.
    """

    def __init__(self, command: Sequence[str], timeout_s: float = 600.0) -> None:
        self._command, self._timeout_s = list(command), timeout_s

    async def _answer(self, engine: Engine, messages: list[Message], agent: Agent) -> str:
        text = json.dumps({"messages": messages})
        try:
            async with asyncio.timeout(self._timeout_s):
                done = await engine.run_program(self._command, text=text, environ=agent.environ)
        except TimeoutError:
            raise AgentFailed(
                f"{self._command[0]} did not end within {self._timeout_s:g} s: raise timeout_s in "
                "rollouts.options, or have it end earlier"
            ) from None
        if done.status:
            said = done.errors.strip()[-LONGEST_SHOWN:] or "it said nothing"
            raise AgentFailed(f"{self._command[0]} ended with status {done.status}: {said}")
        return done.output.strip()
