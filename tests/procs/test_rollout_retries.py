"""Rollouts whose environments are killed begin again elsewhere, and end as they would have."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.rollout_workers.peers import Peer, PeerEnvironments, Peers
from composer_mesh.configs.schema import Config
from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.episode import EpisodePlayer, Played, Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services import service
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.service import Service
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task import Task

SAMPLING = Sampling(temperature=0.0, max_new_tokens=200, max_context=100_000, seed=0)


class Letters:
    """A chat format whose ids are bytes."""

    stop_ids = (0,)

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        return list(json.dumps(messages).encode())

    def continuation(self, messages: Sequence[Message], action: Sequence[int]) -> list[int]:
        return self.first_prompt(messages)

    def action_text(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


@dataclass
class Expert:
    """Stands between rollouts and environments: acts as the task's expert would, and kills.

    `kills` are the numbers of the steps under which the session's process is killed.
    """

    task: Task
    port: PeerEnvironments
    pool: Service
    kills: set[int]
    steps: int = 0
    seen: dict[str, list[Message]] = field(default_factory=dict)

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        ids = list(self.task.expert(self.seen[request.request_id.rpartition("-")[0]]).encode())
        return GenerationResult(request.request_id, ids, [0.0] * len(ids), [0] * len(ids), "stop")

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        messages = await self.port.begin(session_id, episode)
        self.seen[session_id.partition(".")[0]] = list(messages)
        return messages

    async def step(self, session_id: str, text: str, turn: Turn | None = None) -> StepResult:
        self.steps += 1
        if self.steps in self.kills:
            os.kill(await self.pid_of(session_id), signal.SIGKILL)
        result = await self.port.step(session_id, text, turn)
        seen = self.seen[session_id.partition(".")[0]]
        turn = sum(message["role"] == "assistant" for message in seen)
        seen += [assistant_message(text, f"call_{turn}"), *result.messages]
        return result

    async def pid_of(self, session_id: str) -> int:
        """Return the process that has a session."""
        abouts = await self.pool.fanout("describe")
        pids: list[int] = [about["pid"] for about in abouts if about["in_use"]]
        (pid,) = pids
        return pid

    async def finish(self, session_id: str) -> Outcome:
        return await self.port.finish(session_id)

    def abandon(self, session_id: str) -> None:
        self.port.abandon(session_id)


@dataclass
class Player:
    """Plays in this process."""

    player: EpisodePlayer

    def announce(self, samples: Sequence[Sample]) -> list[AbstractContextManager[None]]:
        return [nullcontext() for _ in samples]

    async def play(self, sample: Sample, session: str) -> Played:
        return await self.player.play(sample, session)

    async def close(self) -> None: ...


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {"run": {"name": "retries", "steps": 1}, "data": {"task": "toolbox"}}
    )


async def played(
    host: MeshHost, config: Config, kills: set[int], restarts: int
) -> tuple[list[Trace | None], Service, list[str]]:
    """Eight rollouts one after the other, in a pool of two."""
    rules = RestartRules(restarts, backoff_s=0.05)
    pool = await service.spawn(
        EnvironmentActor, n=2, load=(config,), host=host, name="environment", restart=rules
    )
    told: list[str] = []
    task = make_task(config)
    peers = Peers(partial(CallStream, "test"))

    def follow() -> None:
        serving = [one for one in pool.members() if one.serving and one.actor is not None]
        reasons = {one.name: one.reason for one in pool.members()}
        peers.update(tuple(Peer(one.name, one.actor.ref, one.open) for one in serving), reasons)

    pool.on_change(follow)
    follow()
    expert = Expert(task, PeerEnvironments(peers, 60.0), pool, kills)
    retries = EpisodeRetries(
        SupervisionConfig(), lambda _: None, lambda kind, *_, **__: told.append(kind)
    )
    chat: Any = Letters()
    rollouts = Rollouts(Player(EpisodePlayer(expert, expert, chat)), retries)
    traces = [
        await task_
        for index in range(8)
        for task_ in rollouts.start(task.episode("train", index), index, 1, SAMPLING)
    ]
    return traces, pool, told


async def test_rollouts_whose_environments_are_killed_end_as_they_would_have(
    host: MeshHost, config: Config
) -> None:
    calm, first, nothing = await played(host, config, set(), restarts=5)
    await first.close()
    stormy, pool, told = await played(host, config, {2, 3, 9}, restarts=5)
    assert stormy == calm
    assert all(trace is not None and trace.reward == 1.0 for trace in stormy)
    assert nothing == []
    assert told.count("rollout_retried") >= 1
    assert pool.restarts >= 1
    about = await pool.fanout("describe")
    assert {one["activity"] for one in about} == {"idle"}  # no session was left behind
