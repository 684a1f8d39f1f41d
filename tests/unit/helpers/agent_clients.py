"""An agent endpoint over scripted answers, and the client of OpenAI on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI
from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.actors.rollout_workers.agent_episode import AgentEpisode
from composer_mesh.rollouts.chat import ChatFormat


@dataclass
class OpenedAgent:
    """One episode as its agent reaches it, by the client of OpenAI or by plain HTTP."""

    endpoint: AgentEndpoint
    generation: ScriptedGeneration
    episode: AgentEpisode
    client: AsyncOpenAI
    web: httpx.AsyncClient


@asynccontextmanager
async def opened_agent(
    chat: ChatFormat,
    *texts: str | Exception,
    retry_wait_s: float = 600.0,
    stream_wait_s: float = 600.0,
    **sampling: Any,
) -> AsyncIterator[OpenedAgent]:
    generation, sample = ScriptedGeneration(chat, *texts), a_sample(**sampling)
    serving = AgentEndpoint(
        generation, chat, 500, retry_wait_s=retry_wait_s, stream_wait_s=stream_wait_s
    )
    async with serving as endpoint, endpoint.episode(sample, sample.sampling) as episode:
        url, key = episode.base_url, episode.api_key
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
            httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as web,
        ):
            yield OpenedAgent(endpoint, generation, episode, client, web)
