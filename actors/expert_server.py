"""The expert-server actor: runs the HTTP server of the builtin teachers in its process.

The protocol is in `experts.http`, the experts are in `experts.http`.
"""

import asyncio
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.experts.http import LOOPBACK, Expert, ExpertPanel, ExpertServer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.hosts.address import cluster_address
from composer_mesh.tasks.loading import make_task


class ExpertServerActor(MeshActor):
    """One per run, only if the run has builtin teachers or the builtin hint writer.

    controller -- load --> ExpertServerActor <== HTTP == TeacherReplayActors

    It listens on 127.0.0.1, or on the cluster address if the run has other hosts.
    """

    kind: ClassVar[str] = "expert_server"

    def __init__(self) -> None:
        self._server: ExpertServer | None = None

    @concurrent_endpoint
    async def load(self, config: Config, experts: list[Expert], token: str, port: int = 0) -> str:
        """Serve these experts on the run's task; return the base_url.

        Waits until the task is loaded and the port is bound; port 0 picks a free one. Replaces the
        server of an earlier `load`.
        """
        task = await asyncio.to_thread(make_task, config)
        hints = config.sdpo.on and config.sdpo.hints.has_builtin_writer
        panel = ExpertPanel(task, config.run.seed, experts, writes_hints=hints)
        await self._close_server()
        address = cluster_address() if config.cluster.remote else LOOPBACK
        server = ExpertServer(panel, token, port, address)
        self._server = server.start()
        self.activity = f"serving {len(experts)} experts"
        return server.base_url

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Stop serving. Waits until all connections are closed; `load` serves again."""
        await self._close_server()

    def details(self) -> dict[str, Any]:
        return {"base_url": self._server.base_url if self._server else None}

    async def _close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)
        self.activity = "idle"
