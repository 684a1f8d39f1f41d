"""The command: serves clients until Ctrl-C, from a folder from which it resumes."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.policy import empty_model
from composer_mesh.actors.models.template_process import open_chat
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.heartbeat import HeartbeatRules
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, Supervisor
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.models.model_state import read_state
from composer_mesh.plugins.tinker.models.trained_weights import AdapterLayout, peft_files
from composer_mesh.plugins.tinker.server.access import ClientAccess
from composer_mesh.plugins.tinker.server.app import make_app
from composer_mesh.plugins.tinker.server.mesh_backend import MeshSampleBackend, ServeMesh
from composer_mesh.plugins.tinker.server.openai_api import OpenAiRoutes
from composer_mesh.plugins.tinker.server.options import (
    base_model_of,
    check_same_policy,
    tokenizer_of,
)
from composer_mesh.plugins.tinker.server.rest_routes import Archives
from composer_mesh.plugins.tinker.server.server import ServedModel
from composer_mesh.plugins.tinker.server.server_tasks import ServerTasks, opened_server
from composer_mesh.plugins.tinker.server.training_data import DataLimits
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.directory.resume import with_chat_date
from composer_mesh.services.run.preload import PRELOAD
from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.services.web.options import ListenOptions

CLOSING_S = 5
FAILED = 1

Say = Callable[[str], None]


def serve_command(
    config: Config, output: Path, options: ListenOptions, keys: Sequence[str], say: Say
) -> int:
    """Serve clients until a signal; return the exit status. The folder is locked by the caller."""
    check_same_policy(config, output)
    config = with_chat_date(config)
    with listening_socket(options.host, options.port) as listener:
        return asyncio.run(_serve(config, output, options, keys, listener, say))


async def _serve(
    config: Config,
    output: Path,
    options: ListenOptions,
    keys: Sequence[str],
    listener: socket.socket,
    say: Say,
) -> int:
    stopping = _stopped_by_signals()

    def record(kind: str, actor: str, detail: str, /, **_: Any) -> None:
        say(" ".join(filter(None, [kind, actor, detail])))

    supervisor, rules = Supervisor(record), config.supervision
    preload = PRELOAD if config.placement.fork_server else ()
    beats = HeartbeatRules(rules.heartbeat_s, rules.hang_s)
    async with MeshHost(supervisor, heartbeat=beats, preload=preload) as host:
        host.deadlines.most = rules.restarts
        starting = asyncio.create_task(ServeMesh.start(config, host, record))
        first: list[asyncio.Future[Any]] = [starting, stopping]
        await asyncio.wait(first, return_when="FIRST_COMPLETED")
        if not starting.done():
            await cancel_and_wait([starting])
            return 0
        mesh = starting.result()
        try:
            async with open_chat(config, mesh.folder, []) as chat:
                parts = ServerParts(config, output, options, mesh, chat)
                return await supervisor.guard(_serve_on(parts, keys, listener, say, stopping))
        except MeshError as error:
            sys.stderr.write(f"composer-mesh: {error}\n")
            return FAILED
        finally:
            await mesh.close()


@dataclass(frozen=True)
class ServerParts:
    """What a server is made of, once its processes have loaded."""

    config: Config
    output: Path
    options: ListenOptions
    mesh: ServeMesh
    chat: ChatFormat

    @property
    def served(self) -> ServedModel:
        """Return what clients learn of the server, and their limits."""
        serve, context = self.config.serve, self.config.policy.max_context
        generator, trainer = self.config.generator, self.config.trainer
        return ServedModel(
            base_model_of(self.config),
            tokenizer_of(self.config, self.options, self.mesh.folder),
            DataLimits(self.mesh.vocabulary, context, serve.max_data, serve.max_top_k),
            serve,
            tuple(self.chat.stop_ids),
            self.chat.raw_text,
            tokens_at_once=trainer.microbatch_tokens * trainer.ranks,
            samples_at_once=2 * generator.max_concurrent * generator.replicas,
            adapts_head=generator.engine == "embedded",
        )


async def _serve_on(
    parts: ServerParts,
    keys: Sequence[str],
    listener: socket.socket,
    say: Say,
    stopping: asyncio.Future[Any],
) -> int:
    mesh, served = parts.mesh, parts.served
    async with opened_server(served, parts.output.absolute()) as server:
        tasks = ServerTasks(server, mesh.trainer, MeshSampleBackend(mesh.samplers))
        left = await server.recover()
        files = partial(archive_files, parts.config, mesh.folder, served.base_model)
        cancel = tasks.sampling.cancel
        format = await asyncio.to_thread(CaptureFormat.of, parts.chat, mesh.vocabulary)
        openai = OpenAiRoutes(server, cancel, format).routes()
        app = make_app(server, cancel, Archives(server.folder, files), openai)
        names = parts.options.names
        config = http_config(ClientAccess(app, names, keys), CLOSING_S)
        async with listening(config, listener) as port:
            name = f"[{parts.options.host}]" if ":" in parts.options.host else parts.options.host
            say(f"serving {served.base_model} at http://{name}:{port}, {left} operations left")
            running = asyncio.create_task(tasks.run())
            try:
                await asyncio.wait([running, stopping], return_when="FIRST_COMPLETED")
                if running.done():
                    running.result()
            finally:
                await cancel_and_wait([running])
    say("ended")
    return 0


def _stopped_by_signals() -> asyncio.Future[Any]:
    ended = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, ended.set)
    return asyncio.create_task(ended.wait())


def archive_files(config: Config, folder: Path, base: str, path: Path) -> dict[str, bytes]:
    """Return what peft loads; of all weights, the file as it is. Takes a second."""
    stored = read_state(path)
    if stored.spec.rank == 0:
        return {"weights.safetensors": path.read_bytes()}
    layout = AdapterLayout.of(empty_model(folder), stored.spec)
    return peft_files(stored, layout, base, config.serve.lora_alpha)
