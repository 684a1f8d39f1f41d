"""Agents behind the endpoint, as workflows see them: one endpoint for a worker's episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint, OpenedEpisode
from composer_mesh.rollouts.captured_turns import CapturedTrajectory
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Generation, Sample
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.workflow import Trajectory

There = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
"""Runs a coroutine on the worker's event loop."""


class Agents:
    """The endpoint of a worker; it is started when an agent first needs it."""

    def __init__(self, generation: Generation, chat: ChatFormat) -> None:
        self._generation, self._chat = generation, chat
        self._endpoint: AgentEndpoint | None = None
        self._starting = asyncio.Lock()

    async def endpoint(self) -> AgentEndpoint:
        """Return the endpoint, which serves. Waits for its start."""
        async with self._starting:
            if self._endpoint is None:
                vocabulary = len(self._chat.tokenizer)
                endpoint = AgentEndpoint(self._generation, self._chat, vocabulary)
                self._endpoint = await endpoint.start()
            return self._endpoint

    async def close(self) -> None:
        """Close all connections."""
        if self._endpoint is not None:
            await self._endpoint.close()


class CapturedAgent:
    """An agent's endpoint in one episode, opened by `async with` on a workflow's event loop."""

    def __init__(self, agents: Agents, sample: Sample, there: There) -> None:
        self._agents, self._sample, self._there = agents, sample, there
        self._cleanup = AsyncExitStack()
        self._opened: OpenedEpisode | None = None
        self.base_url = self.api_key = ""

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that clients of OpenAI read."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    def trajectories(
        self,
        reward: float,
        *,
        success: bool | None = None,
        role: str = "",
        rewards: Mapping[str, float] | None = None,
        session: str | None = None,
        screened: bool = False,
    ) -> list[Trajectory]:
        """Return every path of the agent's requests, the longest first, with one reward for all.

        With `session`, only those of requests with that header X-Session-ID, of which there may be
        none. With `screened` nothing of them is trained.
        """
        if self._opened is None:
            raise RuntimeError("the agent was not opened: use it in `async with`")
        if failures := self._opened.failures():
            raise failures[0]
        captured = [one for one in self._opened.trajectories(session) if one.turns]
        if not captured and session is None:
            raise UnusableTask(
                "the agent has not asked its endpoint for anything: give it base_url"
            )
        won = reward >= 1 if success is None else success
        captured.sort(key=lambda one: -sum(len(turn.action_ids) for turn in one.turns))
        return [
            Trajectory(
                _turns(one),
                one.messages,
                reward,
                won,
                role,
                rewards=dict(rewards or {}),
                screened=screened,
            )
            for one in captured
        ]

    async def __aenter__(self) -> Self:
        self._opened = await self._there(self._open())
        self.base_url, self.api_key = self._opened.base_url, self._opened.api_key
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._there(self._cleanup.aclose())

    async def _open(self) -> OpenedEpisode:
        endpoint = await self._agents.endpoint()
        opening = endpoint.episode(self._sample, self._sample.sampling)
        return await self._cleanup.enter_async_context(opening)


def _turns(one: CapturedTrajectory) -> list[Any]:
    return [
        replace(turn, trained=trained) for turn, trained in zip(one.turns, one.trained, strict=True)
    ]
