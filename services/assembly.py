"""The train command: builds a run from its config, runs it, and takes it down again.

The order of start and stop, and what a person is told. The run itself is the controller's.
"""

import asyncio
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.actors.policy import load_tokenizer
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, Supervisor
from composer_mesh.mesh.transport import transport_name
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.errors import TransportUnavailable
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.tasks import Task, make_task
from composer_mesh.services.actor_names import failure_line, placed
from composer_mesh.services.advantages import Advantages, make_advantages
from composer_mesh.services.agreement import AgreementWatch
from composer_mesh.services.batcher import Batcher
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.environments import MeshEnvironments
from composer_mesh.services.generation import LockstepGeneration, PooledGeneration
from composer_mesh.services.hint_writing import HintWriting
from composer_mesh.services.lasting_trainer import LastingTrainer
from composer_mesh.services.mesh_ports import (
    MeshReference,
    MeshTeachers,
)
from composer_mesh.services.metrics import replay_metrics
from composer_mesh.services.replay.late_rewards import LateRewards
from composer_mesh.services.replay.late_store import LATE_FILE, LateStore
from composer_mesh.services.replay.pair_stream import PairStream, Taken
from composer_mesh.services.replay.parts import make_late_rewards, make_pair_stream
from composer_mesh.services.report import read_metrics, summary_table, write_summary
from composer_mesh.services.resume import Begun, rewind
from composer_mesh.services.retries import Retries
from composer_mesh.services.rollout import Rollouts
from composer_mesh.services.run_mesh import RunMesh
from composer_mesh.services.run_store import RunStore
from composer_mesh.services.run_watch import RunWatch
from composer_mesh.services.training import MeshTraining, ReplayTeachers
from composer_mesh.services.view import RunView
from composer_mesh.services.weight_sync import MeshWeightSync
from composer_mesh.services.weight_transport import settled

FAILED = 1


def train_command(config: Config, output: Path, resume: bool) -> int:
    """Train; the exit status is 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM."""
    began = time.monotonic()
    begun = rewind(output, config) if resume else Begun()
    ceiling = config.replay.budget.usd if config.replay.on else None
    shown = RunView(config.run.name, config.run.steps, ceiling_usd=ceiling)
    with RunStore(output, config) as store, shown as view:
        run = Run(config, store, view, begun)
        code = asyncio.run(_until_interrupted(run.live()))
    summary = write_summary(
        output,
        wall_s=time.monotonic() - began,
        evaluations=run.evaluations,
        restarts=run.restarts,
        rest=run.rest,
    )
    # A run should not begin with the import of what draws its end.
    from composer_mesh.services.curve import draw_reward_curve

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
    begun: Begun = field(default_factory=Begun)
    failure: str = ""
    controller: Controller | None = None
    _mesh: RunMesh | None = None
    _trainer: LastingTrainer | None = None
    _watch: RunWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = RunWatch(
            self.store.root, self.config.run, self.view, self.event, self._progress
        )

    @property
    def restarts(self) -> int:
        """Processes that were started in place of others."""
        return sum(part.restarts for part in (self._mesh, self._trainer) if part is not None)

    @property
    def evaluations(self) -> list[Any]:
        return self.controller.evaluations if self.controller else self.begun.evaluations

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
            with settled(self.config, self.store.root) as (config, weights):
                async with MeshHost(supervisor) as host:
                    await self._live_on(host, supervisor, config, weights)
            state = "finished"
            return 0
        except asyncio.CancelledError:
            state = "stopped"
            raise
        except MeshError as error:
            self.failure = failure_line(error, MeshHost.name)
            return FAILED
        except TransportUnavailable as error:
            self.failure = str(error)
            return FAILED
        except Exception as error:  # noqa: BLE001  supervision boundary: what is done is kept
            self.failure = "".join(traceback.format_exception(error)).rstrip()
            return FAILED
        finally:
            self.event(f"run_{state}", "", self.failure.rpartition("\n")[2])
            self._watch.ended(state)

    async def _live_on(
        self, host: MeshHost, supervisor: Supervisor, config: Config, weights: Transport
    ) -> None:
        self.event("run_started", "", f"{self.config.run.name}, process {os.getpid()}")
        if self.begun.checkpoint is not None:
            self.event("run_resumed", "", str(self.begun.checkpoint.folder))
        try:
            await supervisor.guard(self._run_on(host, config, weights))
        finally:
            self.view.phase("stopping actors")

    async def _run_on(self, host: MeshHost, config: Config, weights: Transport) -> None:
        self.view.phase("starting actors")
        signals = f"RDMA over {transport_name()}"
        transport = f"weights by {weights.name}, signals by {signals}"
        await self._watch.open(host, transport)
        self.view.transport(transport)
        detail = f"weights travel by {weights}, teacher signals by {signals}"
        self.event("transport", "", detail, weights=weights.name)
        mesh = self._mesh = await RunMesh.start(config, host, self.event)
        for actor in host.actors:
            self.event("actor_started", actor.name, f"process {actor.pid}")
        try:
            async with self._watch.over(mesh):
                await self._train_on(mesh)
        finally:
            await mesh.close()

    async def _train_on(self, mesh: RunMesh) -> None:
        task = make_task(self.config)
        self.view.phase("preparing the policy")
        folder = await mesh.prepare()
        self.event("policy_ready", "trainer", str(folder))
        self.view.phase("loading the policy")
        chat = ChatFormat(load_tokenizer(folder), task.tools)
        check_chat(chat, hints=self.config.sdpo.on)
        begun = self.begun.checkpoint
        await mesh.load(folder, task, self.store.root, begun.folder if begun else None)
        with closing(LateStore(self.store.root / LATE_FILE)) as late:
            self.controller = self._controller(mesh, task, chat, late)
            assert self._trainer is not None
            await self._trainer.during(self.controller.run())

    def _controller(
        self, mesh: RunMesh, task: Task, chat: ChatFormat, late: LateStore
    ) -> Controller:
        config, advantages = self.config, make_advantages(self.config.advantage)
        closed = config.schedule.max_lag == 0
        generation = (LockstepGeneration if closed else PooledGeneration)(mesh.generators)
        trainer = self._trainer = self._lasting_trainer(mesh)
        ports = Ports(
            Rollouts(generation, MeshEnvironments(mesh.environments), chat, self._retries()),
            self._pair_stream(mesh, chat, late),
            trainer,
            trainer,
            self.store,
            self.view,
            trainer.save,
            self._hint_writing(mesh, task, chat),
            self._late_rewards(late, advantages),
            AgreementWatch(config.agreement, self.event),
        )
        batcher, begun = Batcher(config, task, chat, advantages), self.begun
        return Controller(config, task, batcher, ports, list(begun.evaluations), begun.step)

    def _lasting_trainer(self, mesh: RunMesh) -> LastingTrainer:
        config, ranks, teachers = self.config, mesh.trainers, mesh.teachers
        deadline = config.run.deadline_s
        sync = MeshWeightSync(lambda: ranks.all, mesh.generators, teachers, deadline)
        follow = ReplayTeachers(lambda: ranks.all, teachers, deadline) if teachers else None
        step = MeshTraining(config, lambda: ranks.all, teachers)
        return LastingTrainer(
            config, ranks, step, sync, follow, self.store.root, self.event, self.begun.checkpoint
        )

    def _late_rewards(self, late: LateStore, advantages: Advantages) -> LateRewards | None:
        report = partial(self.event, "late_reward", "")
        rewards = make_late_rewards(self.config, late, advantages, report)
        if rewards is not None:
            for step, groups in self.begun.groups.items():
                rewards.remember(step, groups)
        return rewards

    def _retries(self) -> Retries:
        return Retries(self.config.supervision, self.store.add_poisoned, self.event)

    def _pair_stream(self, mesh: RunMesh, chat: ChatFormat, late: LateStore) -> PairStream | None:
        if mesh.replay is None:
            return None
        reference: MeshReference | None = None
        if mesh.reference is not None:
            reference = MeshReference(mesh.reference, self.config.run.deadline_s)
        teachers = MeshTeachers(mesh.replay)
        ports = (teachers, reference, chat, self.store, late)
        return make_pair_stream(self.config, *ports, start=self.begun.step)

    def _hint_writing(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> HintWriting | None:
        if mesh.hints is None:
            return None
        report = partial(self.event, "hint_not_worded", "hint_writer")
        return HintWriting(mesh.hints, self.config, task, chat, report)

    def _progress(self) -> tuple[int, int]:
        return (self.controller.step if self.controller else 0, self.restarts)

    def event(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        """Record an event and show it."""
        self.store.add_event(kind, actor, detail, placed(actor, fields))
        self.view.event(" ".join(part for part in (kind, actor, detail) if part))
