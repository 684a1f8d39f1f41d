"""The train command: builds a run from its config, runs it and shuts it down.

Owns the start and stop order and what is reported to the user; the controller runs the loop.
"""

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_mesh.actors.models.template_process import open_chat
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.changes import Change
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.loop_watchdog import watch_this_loop
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.pyspy import StackDump
from composer_mesh.mesh.spawn import START_DEADLINE_S, MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.mesh.transport import transport_name
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.rollouts.hints import hint_templates
from composer_mesh.services.checks.keys import held_keys
from composer_mesh.services.controller import Controller
from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.resume import describe_resume
from composer_mesh.services.directory.status import RunProgress, earlier_progress
from composer_mesh.services.inspection.census import placed
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.run.failure_report import FailureReport, report_failure
from composer_mesh.services.run.hosts import RunHosts
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.parts import RunParts, TimelineView
from composer_mesh.services.run.preload import PRELOAD
from composer_mesh.services.run.resume_loader import ResumeContents, load_resume_state
from composer_mesh.services.run.tracking import RunTrackers, TrackedView, final_report
from composer_mesh.services.run.watch import RunWatch
from composer_mesh.services.run.weights_folder import settled
from composer_mesh.services.schedule.metrics import replay_metrics
from composer_mesh.services.schedule.stopping import (
    STOPPED,
    CommandSignals,
    Stopping,
    grace_s,
    until_interrupted,
)
from composer_mesh.services.store.writing import RunStore, disk_error
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer
from composer_mesh.tasks.loading import fewer_episodes, heldout_indices, make_task
from composer_mesh.tasks.task import Task

MEMBER_FILE = ".island"
DIGITS = 16


def with_member(config: Config, root: Path) -> Config:
    """Return an island's config with the identity of its directory, which is made at first.

    A run that is no island is returned unchanged. Raises RunDirectoryError for an unreadable file.
    """
    if not config.islands.on:
        return config
    file = root / MEMBER_FILE
    try:
        member = read_regular(file, 2 * DIGITS).decode("ascii", "replace").strip()
    except FileNotFoundError:
        member = secrets.token_hex(DIGITS // 2)
        write_whole(file, f"{member}\n".encode())
    if len(member) != DIGITS or set(member) - set("0123456789abcdef"):
        raise RunDirectoryError(
            f"{file} holds {member[:40]!r} but must hold {DIGITS} hexadecimal digits: restore it "
            "from a copy, or remove it to continue from the newest common weights"
        )
    islands = config.islands.model_copy(update={"member": member})
    return config.model_copy(update={"islands": islands})


FAILED = 1
UNGUARDED = (
    "task {} states no verified answer, so hints are not checked for it: define verified_answer()"
)


def train_command(
    config: Config,
    output: Path,
    signals: CommandSignals,
    resumed: Sequence[Change] | None = None,
    make_run: "Callable[..., TrainingRun] | None" = None,
) -> int:
    """Train; the exit status is 0, 1 after a failure, 130 after Ctrl-C, 143 after SIGTERM.

    `resumed` is not None for a resumed run: its config changes, possibly none. However many signals
    arrive, the run is shut down and its summary written.
    """
    ceiling = config.replay.budget.usd if config.replay.on else None
    shown = RunView(config.run.name, config.run.steps, ceiling_usd=ceiling)
    with RunStore(output, config) as store, shown as view:
        run = (make_run or TrainingRun)(config, store, view, resumed)
        live = until_interrupted(run.live(), signals, run.stopping, grace_s(config))
        code = run.settled(asyncio.run(live))
    try:
        final_report(
            output,
            config.run.name,
            configured=run.channels,
            progress=run.progress(),
            evaluations=run.evaluations,
            rest=run.rest,
        )
    except OSError as error:
        run.failure = run.failure or str(disk_error(output, error))
        code = FAILED
    if code == FAILED:
        sys.stderr.write(f"composer-mesh: {run.failure}\n")
    elif code:
        Console().print(Text(describe_resume(output, config.run.steps)), soft_wrap=True)
    return code


@dataclass
class TrainingRun:
    """State of one run: its store, view, hosts, mesh and controller."""

    config: Config
    store: RunStore
    view: RunView
    resumed: Sequence[Change] | None = None
    failure: str = ""
    controller: Controller | None = None
    stopping: Stopping = field(default_factory=Stopping)
    _hosts: RunHosts = field(init=False)
    _keys: Keys = field(default_factory=Keys, repr=False)
    _mesh: RunMesh | None = None
    _trainer: FaultTolerantTrainer | None = None
    _past: ResumeContents = field(default_factory=ResumeContents)
    _watch: RunWatch = field(init=False)
    _trackers: RunTrackers = field(init=False)
    _earlier: RunProgress = field(default_factory=RunProgress)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.resumed is not None:
            self._earlier = earlier_progress(self.store.root)
        self._trackers = RunTrackers(self.config, self.store.root, self.event)
        self._watch = RunWatch(
            self.store.root,
            self.config.run,
            self.view,
            self.event,
            self.progress,
            {"stop": self.stop, "join": self.join, "stacks": self.stacks},
        )

    @property
    def restarts(self) -> int:
        """Number of processes started as replacements in this session."""
        return sum(part.restarts for part in (self._mesh, self._trainer) if part is not None)

    @property
    def channels(self) -> list[str]:
        """Names of the channels that the run trains."""
        return self.config.configured_channels

    @property
    def evaluations(self) -> list[Any]:
        return self.controller.evaluations if self.controller else self._past.evaluations

    @property
    def rest(self) -> dict[str, Any]:
        """Metrics of teachers and judges gathered after the last step."""
        if self.controller is None:
            return {}
        rest = replay_metrics(self.controller.step, TakenPairs([], self.controller.rest))
        return {**rest, **self.controller.judge_rest}

    async def live(self) -> int:
        """Start the mesh, run the controller, stop the mesh; returns the exit status."""
        watch_this_loop("controller")
        supervisor = Supervisor(self.event)
        state, reported = "failed", FailureReport()
        try:
            with held_keys(self.config) as self._keys:
                await self._live_with_hosts(supervisor)
            state = "stopped" if self.stopping.stopped else "finished"
            return STOPPED if self.stopping.stopped else 0
        except asyncio.CancelledError:
            state = "stopped"
            raise
        except Exception as error:  # noqa: BLE001  supervision boundary: results are kept
            reported = report_failure(error, self.store.root)
            self.failure = reported.text
            return FAILED
        finally:
            self.event(f"run_{state}", "", reported.line or self._left(state))
            await self._watch.ended(state)
            await self._trackers.close(state)

    def settled(self, code: int) -> int:
        """Wait until all is written; return the exit status, a failure where something is not."""
        try:
            self.store.finish()
        except StoreError as error:
            self.failure = self.failure or str(error)
            return FAILED
        return code

    async def stop(self, now: bool = False) -> bool:
        """Request a stop without waiting; return whether a checkpoint is written first."""
        return self.stopping.ask(now)

    async def join(self, address: str) -> str:
        """Attach another worker and return its host's name in the run."""
        return await self._hosts.join(address)

    async def stacks(self, host: str, pids: Sequence[int], native: bool = False) -> list[StackDump]:
        """Return the Python stacks of processes on one of the run's hosts, for `stacks`."""
        return await self._hosts.stacks(host, pids, native)

    def _left(self, state: str) -> str:
        """Describe where a stopped run would resume."""
        return describe_resume(self.store.root, self.config.run.steps) if state == "stopped" else ""

    async def _live_with_hosts(self, supervisor: Supervisor) -> None:
        """Run on the hosts of the run, and release them however it ends."""
        preload = PRELOAD if self.config.placement.fork_server else ()
        start_deadline_s = max(START_DEADLINE_S, self.config.run.deadline_s)
        host = MeshHost(supervisor, start_deadline_s, preload=preload)
        hosts = self._hosts = RunHosts(self.config, self.store.root, host, self.event)
        try:
            if self.config.cluster.remote:
                self.view.phase("waiting for hosts")
                await hosts.attach()
            transport = settled(self.config, self.store.root, self.event, hosts.count)
            async with transport as (config, weights):
                hosts.shared_memory = weights.name == "shm"
                async with host, hosts.watched():
                    config = with_member(config, self.store.root)
                    await self._live_on(host, supervisor, config, weights)
        finally:
            self.stopping.mark_over()
            await hosts.give_back()

    async def _live_on(
        self, host: MeshHost, supervisor: Supervisor, config: Config, weights: Transport
    ) -> None:
        self.event("run_started", "", f"{self.config.run.name}, process {os.getpid()}")
        supervisor.failure.add_done_callback(lambda _: self.stopping.mark_over())
        # Ends the run at once if its directory is lost, where writes would succeed in vain.
        watching = BackgroundTasks(lambda _task, error: supervisor.fail(error))
        try:
            if self.resumed is not None:
                await self._load_past(self.resumed)
            await self._trackers.start(self.store.reading.metrics)
            watching.start("directory", self.store.until_lost())
            await supervisor.guard(self._run_on(host, config, weights))
        finally:
            self.stopping.mark_over()
            self.view.phase("stopping actors")
            await watching.close()

    async def _load_past(self, changes: Sequence[Change]) -> None:
        """Load the resume state; record what it resumes from and the config changes."""
        for change in changes:
            self.event("config_changed", "", str(change))
        past = self._past = await load_resume_state(self.store, self.config, self.event)
        newest = past.checkpoint
        resumed_from = f"step {newest.step}'s checkpoint" if newest else "the initial policy"
        self.event(
            "run_resumed",
            "",
            f"{past.steps} steps are done; resumes from {resumed_from}, {len(past.again)} of them "
            f"are trained again, {len(past.waiting)} finished groups wait",
        )

    async def _run_on(self, host: MeshHost, config: Config, weights: Transport) -> None:
        self.view.phase("starting actors")
        signals = f"RDMA over {transport_name()}"
        transport = f"weights by {weights.name}, signals by {signals}"
        await self._watch.open(host, transport, self._hosts)
        self.view.transport(transport)
        detail = f"weights travel by {weights}, teacher signals by {signals}"
        self.event("transport", "", detail, weights=weights.name)
        host.started = lambda one: self.event("actor_started", one.name, f"process {one.pid}")
        mesh = self._mesh = await self._start_mesh(config, host)
        host.started = None  # replacements have events of their own
        try:
            async with self._watch.over(mesh):
                try:
                    await self._train_on(mesh)
                finally:
                    self.stopping.mark_over()
        finally:
            await mesh.close()

    async def _start_mesh(self, config: Config, host: MeshHost) -> RunMesh:
        return await RunMesh.start(
            config, host, self.event, self._keys, placements=self._hosts.place()
        )

    async def _train_on(self, mesh: RunMesh) -> None:
        self.view.phase("preparing the policy")
        task = await asyncio.to_thread(make_task, self.config)  # it may read a large file
        episodes = self.config.eval.episodes
        heldout = await asyncio.to_thread(heldout_indices, task, episodes)
        if fewer := fewer_episodes(heldout, episodes):
            self.event("evaluation_smaller", "", fewer)
        if self.config.sdpo.on and not task.states_answers:
            self.event("hints_unguarded", "", UNGUARDED.format(task.name))
        await self._keep_hint_templates(task)
        folder = await mesh.prepare()
        self.event("policy_ready", "trainer", str(folder))
        self.view.phase("loading the policy")
        async with open_chat(self.config, folder, task.tools) as chat:
            await asyncio.to_thread(check_chat, chat, hints=self.config.sdpo.on)
            self.event("chat_format", "trainer", chat.described)
            await self._train_from(mesh, folder, task, chat, heldout)

    async def _keep_hint_templates(self, task: Task) -> None:
        if self.config.sdpo.on:
            known = hint_templates(task.hint_templates, self.config.sdpo.hints.templates)
            await self.store.keep_hint_templates(known)

    async def _train_from(
        self, mesh: RunMesh, folder: Path, task: Task, chat: ChatFormat, heldout: Sequence[int]
    ) -> None:
        past = self._past
        resumed_from = past.checkpoint
        await mesh.load(
            folder, task, self.store.root, resumed_from.folder if resumed_from else None
        )
        parts = self._parts(mesh, task, chat)
        trainer = self._trainer = parts.trainer(resumed_from)
        async with TimelineView(
            TrackedView(self.view, self._trackers),
            mesh.take_activity,
            self.store.add_timeline,
            recorded_by(self.event),
        ) as watch:
            controller = await parts.controller(trainer, watch, past, heldout)
            self.controller, controller.stopping = controller, self.stopping
            self._past = ResumeContents(evaluations=past.evaluations)  # it may hold many rollouts
            await trainer.during(self._train(trainer, controller))

    def _parts(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> RunParts:
        return RunParts(self.config, self.store, mesh, task, chat, self.event)

    async def _train(self, trainer: FaultTolerantTrainer, controller: Controller) -> None:
        if self.resumed is not None:
            self.view.phase("training the steps since the checkpoint again")
            await trainer.catch_up(controller.resume_state.past)
            controller.resume_state.past.clear()  # the trainer holds those it needs
        await controller.run()

    def progress(self) -> RunProgress:
        """Return how far the run is, with what its earlier sessions took."""
        earlier = self._earlier
        return RunProgress(
            self._steps_done(),
            earlier.restarts + self.restarts,
            earlier.sessions + 1,
            earlier.wall_s + time.monotonic() - self._began,
        )

    def _steps_done(self) -> int:
        return self.controller.step if self.controller else self._past.steps

    def event(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        """Record an event and show it."""
        self.store.add_event(kind, actor, detail, placed(actor, fields))
        show = self.view.warning if kind in WARNINGS else self.view.event
        show(" ".join(part for part in (kind, actor, detail) if part))
