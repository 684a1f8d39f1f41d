"""The hint writer of a run: its pool of one, where it asks, where its cache is, and its port.

Only runs with writer = "llm" have one. What is asked and what becomes of it is `hint_writing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.hint_prompts import HINT_WRITER, HintReply, HintRequest
from composer_mesh.services.service import Service

CACHE_FILE = "hints.sqlite"


@dataclass
class MeshHintWriter:
    """The writer's actor as the controller's port.

    `spent` are requests and dollars that the run spent before: they count in its budget.
    """

    pool: Service
    config: Config
    spent: tuple[int, float] = (0, 0.0)

    async def load(self, expert_url: str, run: Path) -> None:
        """Open its cache and connections; raises where the key, address or file is unusable."""
        asked = self.config.sdpo.hints.asked
        assert asked is not None
        cache = asked.cache or run / CACHE_FILE
        writer = writer_endpoint(self.config, expert_url)
        await self.pool.load(writer, asked, cache.absolute(), *self.spent)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """One reply for each request. Waits at most the writer's own timeout."""
        asked = self.config.sdpo.hints.asked
        assert asked is not None
        # Its timeout is its own to keep; the deadline is for a process that does not answer.
        deadline_s = self.config.run.deadline_s + asked.timeout_s
        pool = self.pool.options(deadline_s=deadline_s)
        replies: list[HintReply] = await pool.write(list(requests))
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
