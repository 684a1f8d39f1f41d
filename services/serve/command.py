"""The command: serves clients until Ctrl-C, from a folder with which it goes on after any end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.chat import open_chat
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.heartbeat import HeartbeatRules
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, Supervisor
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.run.preload import PRELOAD
from composer_mesh.services.serve import operation_log as log
from composer_mesh.services.serve.access import ClientAccess
from composer_mesh.services.serve.app import make_app
from composer_mesh.services.serve.archives import Archives
from composer_mesh.services.serve.export import archive_files
from composer_mesh.services.serve.fair_queue import SampleQueue, TrainingQueue
from composer_mesh.services.serve.group_commit import GroupCommit
from composer_mesh.services.serve.housekeeping import Housekeeping, delete_abandoned
from composer_mesh.services.serve.http_server import listening
from composer_mesh.services.serve.mesh_backend import (
    MeshSampleBackend,
    MeshTrainBackend,
    ServeMesh,
)
from composer_mesh.services.serve.model_store import ModelStore
from composer_mesh.services.serve.options import base_model_of, check_same_policy, tokenizer_of
from composer_mesh.services.serve.registry import Registry
from composer_mesh.services.serve.sampling_lane import SamplingFacts, SamplingLane
from composer_mesh.services.serve.server import Served, TrainingServer
from composer_mesh.services.serve.training_data import DataLimits
from composer_mesh.services.serve.training_lane import TrainingLane
from composer_mesh.services.serve_env.options import ServeOptions
from composer_mesh.services.serve_env.sockets import reusable_socket

LOG = "operations.sqlite"
FAILED = 1

Say = Callable[[str], None]


def serve_command(
    config: Config, output: Path, options: ServeOptions, keys: Sequence[str], say: Say
) -> int:
    """Serve clients until a signal; return the exit status. The folder is locked by the caller."""
    check_same_policy(config, output)
    with reusable_socket(options.host, options.port) as listener:
        return asyncio.run(_serve(config, output, options, keys, listener, say))


async def _serve(
    config: Config,
    output: Path,
    options: ServeOptions,
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
        starting = asyncio.create_task(ServeMesh.start(config, host, record))
        first: list[asyncio.Future[Any]] = [starting, stopping]
        await asyncio.wait(first, return_when="FIRST_COMPLETED")
        if not starting.done():
            await cancel_and_wait([starting])
            return 0
        mesh = starting.result()
        try:
            async with open_chat(config, mesh.folder, []) as chat:
                parts = Parts(config, output, options, mesh, chat)
                return await supervisor.guard(_serve_on(parts, keys, listener, say, stopping))
        except MeshError as error:
            sys.stderr.write(f"composer-mesh: {error}\n")
            return FAILED
        finally:
            await mesh.close()


@dataclass(frozen=True)
class Parts:
    """What a server is made of, once its processes have loaded."""

    config: Config
    output: Path
    options: ServeOptions
    mesh: ServeMesh
    chat: ChatFormat

    @property
    def served(self) -> Served:
        """Return what clients learn of the server, and their limits."""
        serve, context = self.config.serve, self.config.policy.max_context
        vocabulary = self.mesh.vocabulary
        data = DataLimits(vocabulary, context, serve.max_data, serve.max_top_k)
        tokenizer = tokenizer_of(self.config, self.options, self.mesh.folder)
        return Served(base_model_of(self.config), tokenizer, data, serve)

    @property
    def facts(self) -> SamplingFacts:
        """Return what samples need to know of the model."""
        stops = tuple(self.chat.stop_ids)
        return SamplingFacts(self.config.policy.max_context, stops, self.chat.raw_text)


class ServerTasks:
    """The server of some parts, with its lanes; `run` executes operations until it is cancelled."""

    def __init__(self, parts: Parts, commits: GroupCommit, found: log.Remembered) -> None:
        config, mesh, served = parts.config, parts.mesh, parts.served
        serve, folder = config.serve, parts.output.absolute()
        training, samples = TrainingQueue(), SampleQueue()
        self.registry = Registry(commits, found)
        self.server = TrainingServer(served, self.registry, commits, training, samples)
        backend = MeshTrainBackend(mesh.trainer)
        store = ModelStore(
            folder,
            self.registry,
            commits,
            backend,
            served.data,
            serve.models_in_memory,
            serve.keep_operations,
        )
        self.training = TrainingLane(
            folder,
            training,
            self.registry,
            commits,
            backend,
            store,
            self.server.answered,
            models_at_once=min(serve.batched_models, serve.models_in_memory),
            tokens_at_once=config.trainer.microbatch_tokens,
            save_every=serve.save_every,
            gap_s=serve.gap_s,
        )
        self.sampling = SamplingLane(
            folder,
            samples,
            self.registry,
            commits,
            MeshSampleBackend(mesh.samplers),
            parts.facts,
            self.server.answered,
            at_once=2 * config.generator.max_concurrent * config.generator.replicas,
        )
        self.server.wake_training = self.training.wake
        self.server.wake_sampling = self.sampling.wake
        self._tidy = Housekeeping(folder, serve, self.registry, commits, self.server)
        self.folder = folder

    async def recover(self) -> int:
        """Queue what the log has unanswered; return how much there was."""
        await asyncio.to_thread(delete_abandoned, self.folder, self.registry)
        return await self.server.recover()

    async def run(self) -> None:
        """Execute operations and tidy up, forever. Raises what ends any of it."""
        running = [
            asyncio.create_task(one.run()) for one in (self.training, self.sampling, self._tidy)
        ]
        try:
            done, _ = await asyncio.wait(running, return_when="FIRST_COMPLETED")
            for one in done:
                one.result()
        finally:
            self.server.ended.set()
            await cancel_and_wait(running)


async def _serve_on(
    parts: Parts,
    keys: Sequence[str],
    listener: socket.socket,
    say: Say,
    stopping: asyncio.Future[None],
) -> int:
    with _log(parts.output) as commits:
        tasks = ServerTasks(parts, commits, await commits.run(log.remembered))
        left = await tasks.recover()
        files = partial(
            archive_files, parts.config, parts.mesh.folder, tasks.server.served.base_model
        )
        app = make_app(tasks.server, tasks.sampling.cancel, Archives(tasks.folder, files))
        names = parts.options.names
        async with listening(ClientAccess(app, names, keys), listener) as port:
            name = f"[{parts.options.host}]" if ":" in parts.options.host else parts.options.host
            base = tasks.server.served.base_model
            say(f"serving {base} at http://{name}:{port}, {left} operations left")
            running = asyncio.create_task(tasks.run())
            try:
                await asyncio.wait([running, stopping], return_when="FIRST_COMPLETED")
                if running.done():
                    running.result()
            finally:
                await cancel_and_wait([running])
    say("ended")
    return 0


@contextmanager
def _log(output: Path) -> Iterator[GroupCommit]:
    file = log.open_log(output / LOG)
    commits = GroupCommit(file)
    try:
        yield commits
    finally:
        commits.close()
        file.close()


def _stopped_by_signals() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop)
    return stopping
