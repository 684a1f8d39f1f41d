"""The train command: builds a run from its config, runs it, and takes it down again.

The order of start and stop, and what a person is told. The run itself is the controller's.
"""

import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.actors.policy import load_tokenizer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.admin import start_admin
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, Supervisor
from composer_mesh.mesh.transport import transport_name
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tasks import Task, make_task
from composer_mesh.services.advantages import make_advantages
from composer_mesh.services.batcher import Batcher
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.curve import draw_reward_curve
from composer_mesh.services.generation import LockstepGeneration, PooledGeneration
from composer_mesh.services.hint_writing import HintWriting
from composer_mesh.services.mesh_ports import (
    MeshEnvironments,
    MeshReference,
    MeshTeachers,
    MeshTraining,
)
from composer_mesh.services.metrics import replay_metrics
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.replay.pair_stream import PairStream, Taken
from composer_mesh.services.replay.parts import make_late_rewards, make_pair_stream
from composer_mesh.services.report import read_metrics, summary_table, write_summary
from composer_mesh.services.rollout import Rollouts
from composer_mesh.services.run_mesh import RunMesh
from composer_mesh.services.run_store import RunStore
from composer_mesh.services.status import RunStatus, write_status
from composer_mesh.services.view import RunView
from composer_mesh.services.weight_sync import MeshWeightSync

FAILED = 1
STATUS_EVERY_S = 1.0


def train_command(config: Config, output: Path, resume: bool) -> int:
    """Train; the exit status is 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM."""
    assert not resume, "the command line refuses --resume until runs can be resumed"
    began = time.monotonic()
    ceiling = config.replay.budget.usd if config.replay.on else None
    shown = RunView(config.run.name, config.run.steps, ceiling_usd=ceiling)
    with RunStore(output, config) as store, shown as view:
        run = Run(config, store, view)
        code = asyncio.run(_until_interrupted(run.live()))
    summary = write_summary(
        output,
        wall_s=time.monotonic() - began,
        evaluations=run.evaluations,
        restarts=run.restarts,
        rest=run.rest,
    )
    curve = output / "reward.png"
    metrics = read_metrics(output / "metrics.jsonl")
    draw_reward_curve(metrics, curve, evaluations=run.evaluations, title=config.run.name)
    console = Console()
    console.print(summary_table(config.run.name, summary))
    console.print(f"reward curve: {curve}", markup=False, highlight=False, soft_wrap=True)
    if code == FAILED:
        sys.stderr.write(f"composer-mesh: {run.failure}\n")
    return code


async def _until_interrupted(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end, or until SIGINT or SIGTERM; then let everything be taken down in order.

    That takes a bounded time, so further signals do not disturb it.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    received: list[int] = []

    def interrupt(number: int) -> None:
        if not received:
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


@dataclass
class Run:
    """One run while it lives."""

    config: Config
    store: RunStore
    view: RunView
    failure: str = ""
    restarts: int = 0
    controller: Controller | None = None
    _status: dict[str, Any] = field(default_factory=dict)

    @property
    def evaluations(self) -> list[Any]:
        return self.controller.evaluations if self.controller else []

    @property
    def rest(self) -> dict[str, Any]:
        """What the teachers did after the last step, as metrics of a step."""
        if self.controller is None:
            return {}
        return replay_metrics(self.controller.step, Taken([], self.controller.rest))

    async def live(self) -> int:
        """Start the mesh, run the controller, stop the mesh; returns the exit status."""
        supervisor = Supervisor(self.event)
        state = "failed"
        try:
            async with MeshHost(supervisor) as host:
                self.event("run_started", "", f"{self.config.run.name}, process {os.getpid()}")
                try:
                    await supervisor.guard(self._run_on(host))
                finally:
                    self.view.phase("stopping actors")
            state = "finished"
            return 0
        except asyncio.CancelledError:
            state = "stopped"
            raise
        except MeshError as error:
            self.failure = str(error)
            return FAILED
        except Exception as error:  # noqa: BLE001  supervision boundary: what is done is kept
            self.failure = "".join(traceback.format_exception(error)).rstrip()
            return FAILED
        finally:
            self.event(f"run_{state}", "", self.failure.rpartition("\n")[2])
            if self._status:
                self._write_status(state=state, actors=())

    async def _run_on(self, host: MeshHost) -> None:
        self.view.phase("starting actors")
        transport = transport_name()
        self._status = {"admin_url": await start_admin(host), "transport": transport}
        self.view.transport(transport)
        self.event("transport", "", f"weights and teacher signals travel by RDMA over {transport}")
        mesh = await RunMesh.start(self.config, host, self.event)
        for actor in host.actors:
            self.event("actor_started", actor.name, f"process {actor.pid}")
        watching = asyncio.create_task(self._watch(mesh))
        watching.add_done_callback(self._watch_ended)
        try:
            await self._train_on(mesh)
        finally:
            await cancel_and_wait([watching])
            await mesh.close()
            self.restarts = mesh.restarts

    async def _train_on(self, mesh: RunMesh) -> None:
        task = make_task(self.config)
        self.view.phase("preparing the policy")
        folder = await mesh.prepare()
        self.event("policy_ready", "trainer", str(folder))
        self.view.phase("loading the policy")
        chat = ChatFormat(load_tokenizer(folder), task.tools)
        check_chat(chat, hints=self.config.sdpo.on)
        await mesh.load(folder, task, self.store.root)
        with closing(LateStore(self.store.root / LATE_FILE)) as late:
            self.controller = self._controller(mesh, task, chat, late)
            await self.controller.run()

    def _controller(
        self, mesh: RunMesh, task: Task, chat: ChatFormat, late: LateStore
    ) -> Controller:
        config, advantages = self.config, make_advantages(self.config.advantage)
        closed = config.schedule.max_lag == 0
        generation = (LockstepGeneration if closed else PooledGeneration)(mesh.generators)
        deadline = config.run.deadline_s
        ports = Ports(
            Rollouts(generation, MeshEnvironments(mesh.environments), chat),
            self._pair_stream(mesh, chat, late),
            MeshTraining(config, mesh.trainers, mesh.teachers),
            MeshWeightSync(mesh.trainer, mesh.generators, mesh.teachers, deadline),
            self.store,
            self.view,
            self._saver(mesh),
            self._hint_writing(mesh, task, chat),
            make_late_rewards(config, late, advantages, partial(self.event, "late_reward", "")),
        )
        return Controller(config, task, Batcher(config, task, chat, advantages), ports)

    def _pair_stream(self, mesh: RunMesh, chat: ChatFormat, late: LateStore) -> PairStream | None:
        if mesh.replay is None:
            return None
        reference: MeshReference | None = None
        if mesh.reference is not None:
            reference = MeshReference(mesh.reference, self.config.run.deadline_s)
        teachers = MeshTeachers(mesh.replay)
        return make_pair_stream(self.config, teachers, reference, chat, self.store, late)

    def _hint_writing(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> HintWriting | None:
        if mesh.hints is None:
            return None
        report = partial(self.event, "hint_not_worded", "hint_writer")
        return HintWriting(mesh.hints, self.config, task, chat, report)

    def _saver(self, mesh: RunMesh) -> Callable[[int], Awaitable[None]]:
        async def save(step: int) -> None:
            folder = self.store.root / "checkpoints" / f"step-{step}"
            await mesh.trainer.call(
                "save", folder.absolute(), deadline_s=self.config.run.deadline_s
            )
            self.event("checkpoint", "trainer", str(folder))

        return save

    async def _watch(self, mesh: RunMesh) -> None:
        """Keep status.json and the live view true to the mesh, until cancelled."""
        while True:
            with suppress(MeshError):  # a dead actor ends the run through the supervisor
                actors = tuple(await mesh.describe())
                self.view.actors(actors)
                self._write_status(state="running", actors=actors)
            await asyncio.sleep(STATUS_EVERY_S)

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        """A status that can no longer be written is told; it is no reason to end the run."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.event("status_stopped", "", f"{type(error).__name__}: {error}")

    def _write_status(self, **changes: Any) -> None:
        step = self.controller.step if self.controller else 0
        self._status |= changes
        status = RunStatus(
            pid=os.getpid(),
            step=step,
            steps=self.config.run.steps,
            policy_version=step,
            **self._status,
        )
        write_status(self.store.root, status)

    def event(self, kind: str, actor: str, detail: str) -> None:
        """Record an event and show it."""
        self.store.add_event(kind, actor, detail)
        self.view.event(" ".join(part for part in (kind, actor, detail) if part))
