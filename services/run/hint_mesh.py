"""The hint writer of a run: its pool of one process, its endpoint, cache and port.

Used only with writer = "llm"; `hint_writing` makes the requests and uses the replies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.actors.provider.client import TeacherEndpoint
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.hint_prompts import HINT_WRITER, HintReply, HintRequest
from composer_mesh.services.service import Service

CACHE_FILE = "hints.sqlite"


@dataclass
class MeshHintWriter:
    """Implements the controller's hint-writer port with the writer's actor.

    `spent` are the requests and dollars that the run spent before; they count against its budget.
    """

    pool: Service
    config: Config
    keys: Keys = field(repr=False)
    spent: tuple[int, float] = (0, 0.0)

    async def load(self, expert_url: str, run: Path) -> None:
        """Open its cache and connections; raises if the key, address or file is unusable."""
        writer_config = self.config.sdpo.hints.active_writer
        assert writer_config is not None
        cache = writer_config.cache or run / CACHE_FILE
        writer = writer_endpoint(self.config, expert_url)
        await self.pool.load(writer, writer_config, cache.absolute(), *self.spent, self.keys)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """Return one reply per request. Waits at most the writer's own timeout."""
        writer_config = self.config.sdpo.hints.active_writer
        assert writer_config is not None
        # The writer enforces its own timeout; the deadline covers a process that does not answer.
        deadline_s = self.config.run.deadline_s + writer_config.timeout_s
        pool = self.pool.options(deadline_s=deadline_s)
        replies: list[HintReply] = await pool.write(list(requests))
        return replies


def writer_endpoint(config: Config, expert_url: str) -> TeacherEndpoint:
    """Return the endpoint of the configured writer."""
    writer_config = config.sdpo.hints.active_writer
    assert writer_config is not None
    if writer_config.kind == "builtin":
        return TeacherEndpoint("hint writer", expert_url, HINT_WRITER, TOKEN_ENV)
    return TeacherEndpoint(
        "hint writer",
        str(writer_config.url),
        str(writer_config.model),
        writer_config.key_variable,
        writer_config.api_key_file.absolute() if writer_config.api_key_file else None,
        routing={} if writer_config.kind == "openrouter" else None,
    )
