"""The hint writer of a run: its actor, where it asks, where its cache is, and its port.

Only runs with writer = "llm" have one. What is asked and what becomes of it is `hint_writing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.expert_http import TOKEN_ENV
from composer_mesh.actors.hint_writer import HintWriterActor
from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost, SpawnedActor
from composer_mesh.rollouts.hint_prompts import HINT_WRITER, HintReply, HintRequest

CACHE_FILE = "hints.sqlite"


@dataclass(frozen=True)
class MeshHintWriter:
    """The writer's actor as the controller's port."""

    actor: SpawnedActor
    config: Config

    @classmethod
    async def start(cls, config: Config, host: MeshHost, token: str) -> "MeshHintWriter":
        """Start its process. Waits until it answers."""
        actor = await host.spawn("hint_writer", HintWriterActor, env={TOKEN_ENV: token})
        return cls(actor, config)

    async def load(self, expert_url: str, run: Path) -> None:
        """Open its cache and connections; raises where the key, address or file is unusable."""
        asked = self.config.sdpo.hints.asked
        assert asked is not None
        cache = asked.cache or run / CACHE_FILE
        await self.actor.call(
            "load",
            writer_endpoint(self.config, expert_url),
            asked,
            cache.absolute(),
            deadline_s=self.config.run.deadline_s,
        )

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """One reply for each request. Waits at most the writer's own timeout."""
        asked = self.config.sdpo.hints.asked
        assert asked is not None
        # Its timeout is its own to keep; the deadline is for a process that does not answer.
        deadline_s = self.config.run.deadline_s + asked.timeout_s
        replies: list[HintReply] = await self.actor.call(
            "write", list(requests), deadline_s=deadline_s
        )
        return replies


def writer_endpoint(config: Config, expert_url: str) -> TeacherEndpoint:
    """Where the configured writer is asked."""
    asked = config.sdpo.hints.asked
    assert asked is not None
    if asked.kind == "builtin":
        return TeacherEndpoint("hint writer", expert_url, HINT_WRITER, TOKEN_ENV)
    return TeacherEndpoint(
        "hint writer",
        str(asked.url),
        str(asked.model),
        asked.key_variable,
        asked.api_key_file.absolute() if asked.api_key_file else None,
        routing={} if asked.kind == "openrouter" else None,
    )
