"""The rollout actor: plays whole episodes, many at once.

Chat rendering, tokenizing and the connections to generators and environments are here, so that the
controller hands out samples and gets finished traces, whatever the number of turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.models.template_process import open_chat
from composer_mesh.actors.rollout_workers.peers import (
    LockstepGeneration,
    Neighbours,
    OpenStream,
    PeerEnvironments,
    Peers,
    PooledGeneration,
    Round,
)
from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor, end_this_process
from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.episode import EpisodePlayer, Played, Sample
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore
from composer_mesh.tasks.loading import make_workflow


class RolloutActor(MeshActor):
    """One process that plays episodes.

    controller -- samples --> RolloutActor -- finished traces --> controller
    RolloutActor <-- token ids --> generators;  RolloutActor <-- actions, results --> environments
    """

    kind: ClassVar[str] = "rollouts"

    def __init__(self) -> None:
        self._cleanup = AsyncExitStack()
        self._playing: set[str] = set()
        self._players: dict[str, EpisodePlayer | WorkflowPlayer] = {}

    @concurrent_endpoint
    async def load(
        self, config: Config, folder: Path, tools: Mapping[str, list[dict[str, Any]]]
    ) -> None:
        """Load the policy's tokenizer and chat format, and the workflow; `tools` are by task."""
        self._config = config
        self._workflow = await asyncio.to_thread(make_workflow, config)
        chat = await self._cleanup.enter_async_context(open_chat(config, folder, []))
        self._chats = {task: replace(chat, tools=found) for task, found in tools.items()}
        # The first rendering starts the process of a foreign model's template.
        for one in self._chats.values():
            await asyncio.to_thread(check_chat, one, hints=False)

    @concurrent_endpoint
    async def connect(self, name: str, neighbours: Neighbours) -> None:
        """Call these generators and environments from now on; `name` is this actor's own.

        The controller repeats it with every change. Calls to actors that are gone end at once.
        """
        if not self._players:
            self._connect(self.open_stream(name))
        self._generators.update(neighbours.generators, neighbours.gone)
        self._environments.update(neighbours.environments, neighbours.gone)

    @concurrent_endpoint
    async def play(self, sample: Sample, session: str, home: str = "") -> Played:
        """Play one attempt at a sample. Waits for its last turn; cancelled, it leaves nothing.

        It continues in a session that a dead worker has left at the environment `home`.
        """
        if not self._players:
            raise RuntimeError("the rollout worker knows no generators: call connect first")
        self._playing.add(session)
        if isinstance(self._generation, PooledGeneration):
            self._generation.routing.begin(sample.group)
        player = self._players[sample.episode.task]
        try:
            return await player.play(sample, session, home)
        finally:
            self._ended(sample, session)

    @concurrent_endpoint
    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together. Waits for an environment."""
        return await self._sessions.score_group(episode, group)

    @concurrent_endpoint
    async def waiting(self) -> list[str]:
        """Return the names of the requests that wait for a round. Waits until all episodes do."""
        return await self._lockstep().waiting()

    @concurrent_endpoint
    async def release(self, turn: Round) -> None:
        """Send this worker's requests of a round to the generators."""
        self._lockstep().release(turn)

    def in_use(self) -> int:
        return len(self._playing)

    def details(self) -> dict[str, Any]:
        playing = len(self._playing)
        return {
            "activity": f"playing {playing} episodes" if playing else "idle",
            "playing": playing,
        }

    def open_stream(self, name: str) -> OpenStream:
        """Return how this actor, of that name, opens the calls to another one."""
        return partial(CallStream, name, failed=end_this_process)

    async def __cleanup__(self, _: Exception | None) -> None:
        await self._cleanup.aclose()

    def _connect(self, open_stream: OpenStream) -> None:
        rules = self._config.supervision
        self._generators, self._environments = Peers(open_stream), Peers(open_stream)
        closing = [self._generators.close, self._environments.close]
        self._generation: PooledGeneration | LockstepGeneration
        if self._config.schedule.max_lag == 0:
            self._generation = LockstepGeneration(self._generators, lambda: len(self._playing))
            closing.append(self._generation.close)
        else:
            self._generation = PooledGeneration(self._generators, 1 + rules.rollout_retries)
        deadline_s = self._config.run.deadline_s + self._config.judges.patience_s
        environments = self._sessions = PeerEnvironments(self._environments, deadline_s)
        for close in (*closing, environments.close):
            self._cleanup.push_async_callback(close)
        self._players = {
            task: self._player(environments, chat) for task, chat in self._chats.items()
        }

    def _player(
        self, environments: PeerEnvironments, chat: ChatFormat
    ) -> EpisodePlayer | WorkflowPlayer:
        if self._workflow is None:
            return EpisodePlayer(self._generation, environments, chat)
        limit_s = self._config.rollouts.workflow_s
        player = WorkflowPlayer(self._workflow, self._generation, environments, chat, limit_s)
        self._cleanup.push_async_callback(player.close)
        return player

    def _lockstep(self) -> LockstepGeneration:
        if not isinstance(self._generation, LockstepGeneration):
            raise RuntimeError("rollouts may lag here, and take no turns together")
        return self._generation

    def _ended(self, sample: Sample, session: str) -> None:
        self._playing.discard(session)
        if isinstance(self._generation, PooledGeneration):
            self._generation.routing.end(sample.group, sample.trace_id)
        else:
            self._generation.changed()
