"""Partial runs: started, watched and shut down like full runs, with half of the actors.

    train CONFIG --from-traces DIR    the trainer alone, on the rollouts of a run
    train CONFIG --rollout-only       the generators alone; nothing is trained

Their work is implemented by `train_from_traces` and `sampling`.

Samples and stores rollouts with one policy version, without a trainer.

As many groups are in flight as in a full run, whose window allows `max_lag` steps ahead. The groups
stay `finished`: a later `train --from-traces` uses them in order.
"""

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from composer_mesh.actors.models.template_process import open_chat
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.partial_runs.stored_steps import (
    StoredSteps,
    TrainingFromTraces,
    TrainingFromTracesPorts,
    as_trained,
)
from composer_mesh.services.replay.late_rewards import make_late_rewards
from composer_mesh.services.run.assembly import FAILED, TrainingRun
from composer_mesh.services.run.mesh import RunHalf, RunMesh
from composer_mesh.services.run.parts import RunParts
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.schedule.stopping import CommandSignals, until_interrupted
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import FirstReasons
from composer_mesh.services.steps.logprob_mismatch import Trained
from composer_mesh.services.steps.ports import Store
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer
from composer_mesh.services.training.step import MeshTraining, MeshWeightSync, RestoredTeachers
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Sampled:
    """Totals of the rollouts sampled in `seconds`; `tokens` counts sampled ones only."""

    step: int
    rollouts: int
    tokens: int
    reward: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rollouts:,} rollouts, {self.tokens:,} tokens in {self.seconds:.1f} s, "
            f"{self.tokens_per_s:,.0f} tokens/s, mean reward {self.reward:.3f}"
        )


class RolloutsOnly:
    """Sampling loop of one event loop; `tell` is called with each step's worth of groups."""

    def __init__(
        self,
        config: Config,
        task: Task,
        rollouts: Rollouts,
        store: Store,
        tell: Callable[[Sampled], None],
    ) -> None:
        self._config, self._rollouts, self._tell = config, rollouts, tell
        self._groups = Groups(config, task, rollouts, store, None, None, {})
        self.done: list[Sampled] = []

    async def run(self) -> None:
        """Sample every group of the run. Waits for the last one; no task is left running."""
        try:
            await self._run()
        finally:
            await self._groups.close()
            await self._rollouts.close()

    @property
    def total(self) -> Sampled:
        """Totals over all steps."""
        rollouts = sum(one.rollouts for one in self.done)
        rewards = sum(one.reward * one.rollouts for one in self.done)
        return Sampled(
            len(self.done),
            rollouts,
            sum(one.tokens for one in self.done),
            rewards / rollouts if rollouts else 0.0,
            sum(one.seconds for one in self.done),
        )

    async def _run(self) -> None:
        schedule, steps = self._config.schedule, self._config.run.steps
        size, entered, now = schedule.prompts_per_step, 0, asyncio.get_running_loop().time
        for step in range(steps):
            began, limit = now(), min(steps, step + 1 + schedule.max_lag) * size
            self._groups.enter(range(entered, limit), 0)
            entered = limit
            groups = await self._groups.collect(size)
            sizes = [len(group.traces) for group in groups]
            self._rollouts.retries.check_step(step + 1, sizes, schedule.group_size)
            traces = [trace for group in groups for trace in group.traces]
            rewards = sum(trace.reward for trace in traces)
            mean = rewards / len(traces) if traces else 0.0
            tokens = sum(trace.action_tokens() for trace in traces)
            self.done.append(Sampled(step + 1, len(traces), tokens, mean, now() - began))
            self._tell(self.done[-1])


def partial_run_command(
    config: Config, output: Path, source: Path | None, signals: CommandSignals
) -> int:
    """Train on the rollouts of a run, or sample if `source` is None; exit status as of train."""
    shown = RunView(config.run.name, config.run.steps)
    with ExitStack() as stack:
        reader = None if source is None else stack.enter_context(RunReader(source))
        store = stack.enter_context(RunStore(output, config))
        view = stack.enter_context(shown)
        run: PartialRun = SamplingRun(config, store, view)
        if source is not None and reader is not None:
            run = TrainFromTracesRun(config, store, view, source=reader, root=source)
        code = run.settled(asyncio.run(until_interrupted(run.live(), signals, run.stopping)))
    Console().print(Text(f"{config.run.name}: {run.summary}"), soft_wrap=True)
    if code == FAILED:
        sys.stderr.write(f"composer-mesh: {run.failure}\n")
    return code


@dataclass
class PartialRun(TrainingRun, ABC):
    """Common base of the two partial runs."""

    half: RunHalf = "sampling"
    summary: str = "nothing was done"
    """Result that is printed for the user."""

    async def _start_mesh(self, config: Config, host: MeshHost) -> RunMesh:
        placements = self._hosts.place()
        return await RunMesh.start(config, host, self.event, self._keys, self.half, placements)

    async def _train_on(self, mesh: RunMesh) -> None:
        task = make_task(self.config)
        await self._keep_hint_templates(task)
        self.view.phase("preparing the policy")
        folder = await mesh.prepare()
        self.event("policy_ready", "trainer", str(folder))
        async with open_chat(self.config, folder, task.tools) as chat:
            await asyncio.to_thread(check_chat, chat, hints=self.config.sdpo.on)
            self.event("chat_format", "trainer", chat.described)
            self.view.phase("loading the policy")
            await mesh.load(folder, task, self.store.root)
            await self._work(mesh, task, chat)

    def _left(self, state: str) -> str:
        """Describe the result: a partial run cannot be resumed."""
        return self.summary if state == "stopped" else ""

    @abstractmethod
    async def _work(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> None:
        """Do the work of this partial run. Waits until it is done."""


@dataclass
class SamplingRun(PartialRun):
    """Sampling with the generators, without a trainer."""

    half: RunHalf = "sampling"
    rollouts: RolloutsOnly | None = None

    async def _work(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> None:
        parts = RunParts(self.config, self.store, mesh, task, chat, self.event)
        rollouts = parts.rollouts(ResumeContents())
        self.rollouts = RolloutsOnly(self.config, task, rollouts, self.store, self._tell)
        self.view.phase("sampling")
        await self.rollouts.run()

    def _tell(self, sampled: Sampled) -> None:
        assert self.rollouts is not None
        self.summary = str(self.rollouts.total)
        fields = {"tokens": sampled.tokens, "tokens_per_s": round(sampled.tokens_per_s, 1)}
        where = f"{sampled.step} of {self.config.run.steps}"
        self.event("rollouts_sampled", "", f"{where}: {sampled}", **fields)

    def _steps_done(self) -> int:
        return len(self.rollouts.done) if self.rollouts else 0


@dataclass
class TrainFromTracesRun(PartialRun):
    """Training on the rollouts stored in `source`."""

    half: RunHalf = "training"
    source: RunReader | None = None
    root: Path = Path()
    """Directory of the run that the rollouts are from."""
    training: TrainingFromTraces | None = None

    async def _work(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> None:
        assert self.source is not None
        make_steps = partial(self._steps, task, chat)
        steps = await in_thread(make_steps)
        trainer = self._lasting_trainer(mesh, make_steps)
        self._trainer = trainer
        weights = trainer if mesh.teachers is not None else None
        ports = TrainingFromTracesPorts(
            trainer, weights, self.store, self.view, trainer.save, trainer.saved
        )
        self.training = TrainingFromTraces(self.config, steps, ports)
        self.view.phase("training stored rollouts")
        await trainer.during(self.training.run())
        if steps.pairs_left_out:
            detail = f"{steps.pairs_left_out} stored pairs have no scores of a reference"
            self.event("pairs_left_out", "", detail)
        done, differs = self.training.step, self.training.differences
        self.summary = str(differs)
        if new := done - differs.steps:
            self.summary = f"{self.summary}; {new} trained for the first time"
        self.event("replayed", "trainer", self.summary)

    def _steps(self, task: Task, chat: ChatFormat) -> StoredSteps:
        assert self.source is not None
        return StoredSteps(self.source, self.config, self._step_builder(task, chat))

    def _lasting_trainer(
        self, mesh: RunMesh, make_steps: Callable[[], StoredSteps]
    ) -> FaultTolerantTrainer:
        config, ranks, teachers = self.config, mesh.trainers, mesh.teachers
        deadline, all_ranks = config.run.deadline_s, lambda: ranks.all
        step = MeshTraining(config, all_ranks, teachers, self.store.add_divergences)
        root = self.store.root
        follow = None if teachers is None else RestoredTeachers(all_ranks, teachers, deadline)
        sync = MeshWeightSync(all_ranks, None, teachers, deadline)

        def earlier(first: int, until: int) -> list[Trained]:
            return as_trained(make_steps(), self.store.reading, first, until)

        return FaultTolerantTrainer(config, ranks, step, sync, follow, root, self.event, earlier)

    def _step_builder(self, task: Task, chat: ChatFormat) -> StepBuilder:
        assert self.source is not None
        limit_s = self.config.supervision.custom_function_s
        advantages = make_advantages(self.config.advantage, limit_s)
        report = partial(self.event, "late_reward", "")
        # Stored steps contain late-reward corrections, which this config may not enable.
        before = load_config(self.root / "config.toml", model_later=True)
        late = make_late_rewards(before, self.source.rewards, advantages, report)
        unwritten = FirstReasons(partial(self.event, "hints_missing", "trainer"))
        return StepBuilder(Batcher(self.config, task, chat, advantages, unwritten), late)

    def _steps_done(self) -> int:
        return self.training.step if self.training else 0
