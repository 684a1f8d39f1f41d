"""Builds the controller and trainer of a run from its config, store and live actors.

The timeline of a run: what each actor did for its callers, one line of a file for each step.

    {"step": 12, "began": ..., "ended": ..., "worked": {"trainer": 1.25, ...},
     "busy": [["trainer", "train", began, ended], ...]}

`worked` has seconds; other times are seconds since 1970. Calls that are no work are left out.

Makes the order of a run's training episodes, with what the run has measured so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.heartbeat import Busy
from composer_mesh.mesh.waiting import BackgroundTasks, Failed, in_thread
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.curriculum import Curriculum, EpisodeOrder, TaskSource
from composer_mesh.rollouts.number_words import load_rules
from composer_mesh.services.checks.task import training_rows
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers
from composer_mesh.services.replay.late_rewards import make_late_rewards
from composer_mesh.services.replay.pair_stream import PairStream, make_pair_stream
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.resume_loader import (
    ResumeContents,
    restore_teacher_queries,
    resume_state_of,
    trained_steps,
)
from composer_mesh.services.schedule.groups import ResumeState
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import FirstReasons, HintWriting
from composer_mesh.services.steps.logprob_mismatch import LogprobMismatchMonitor, Trained
from composer_mesh.services.steps.ports import Watcher
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer
from composer_mesh.services.training.step import MeshTraining, MeshWeightSync, RestoredTeachers
from composer_mesh.tasks.task import Task


def make_episode_order(config: Config, task: Task, past: ResumeContents) -> EpisodeOrder:
    """Return the order of a new or resumed run; an error of the task's own code names its line."""
    islands = config.islands
    share = (islands.rank, islands.world_size) if islands.on else (0, 1)
    if config.data.curriculum is None:
        return EpisodeOrder(*share)
    weights = [one.weight for one in config.data.tasks]
    sources = [
        TaskSource(part.name, weight, training_rows(part))
        for part, weight in zip(task.parts, weights, strict=True)
    ]
    order = Curriculum(config.data.curriculum, config.run.seed, sources, task, *share)
    for step, results in past.results:
        order.settle(step, results)
    for group_id, stored in past.waiting.items():
        if stored.traces:
            order.restore(group_id, stored.traces[0].index)
    return order


NOT_WORK = frozenset({"describe", "close_calls", "forget", "hold", "waiting", "connect", "release"})
GAPS = 400
"""Intervals of one endpoint are joined where less than this part of a step is between them."""
MOST_OF_A_STEP = 400
"""Intervals of a step that are written, the longest ones of each actor."""


class TimelineView:
    """The display of a run that also writes the timeline, by `write`, with each step.

    `take` returns the busy intervals since the last call. It may wait for actors, so lines are
    written in the background, in order; leaving the context waits for the last one. What begins
    while an actor is waited for is of a later line.
    """

    def __init__(
        self,
        view: Watcher,
        take: Callable[[], Awaitable[Sequence[Busy]]],
        write: Callable[[Mapping[str, Any]], None],
        failed: Failed,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._view, self._take, self._write, self._clock = view, take, write, clock
        self._lines, self._one = BackgroundTasks(failed), asyncio.Lock()
        self._later: list[Busy] = []

    async def __aenter__(self) -> Self:
        await self._take()  # what preparations did belongs to no step
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._lines.wait()

    def update(self, step: Mapping[str, Any]) -> None:
        self._view.update(step)
        ended = self._clock()
        began = ended - float(step.get("time/step_s") or 0.0)
        self._lines.start("timeline", self._add_line(int(step["step"]), began, ended))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._view.evaluation(evaluation)

    def phase(self, text: str) -> None:
        self._view.phase(text)

    async def _add_line(self, step: int, began: float, ended: float) -> None:
        async with self._one:
            busy = [*self._later, *await self._take()]
            self._later = [one for one in busy if one.ended > ended]
            self._write(timeline_of(step, began, ended, [one for one in busy if one.began < ended]))


def timeline_of(step: int, began: float, ended: float, busy: Sequence[Busy]) -> dict[str, Any]:
    """Return the line of a step: the time that each actor worked, and its longest intervals."""
    actors: dict[str, list[Busy]] = {}
    for one in busy:
        if one.endpoint not in NOT_WORK:
            actors.setdefault(one.actor, []).append(one)
    most = max(1, MOST_OF_A_STEP // max(1, len(actors)))
    kept: list[Busy] = []
    for work in actors.values():
        bars = joined(work, (ended - began) / GAPS)
        kept += sorted(bars, key=lambda one: one.began - one.ended)[:most]
    kept.sort(key=lambda one: one.began)
    return {
        "step": step,
        "began": round(began, 3),
        "ended": round(ended, 3),
        "worked": {
            name: round(covered_s([(one.began, one.ended) for one in work], began, ended), 3)
            for name, work in sorted(actors.items())
        },
        "busy": [
            [one.actor, one.endpoint, round(one.began, 3), round(one.ended, 3)] for one in kept
        ],
    }


def joined(busy: Sequence[Busy], gap_s: float) -> list[Busy]:
    """Return the intervals of one actor, those of an endpoint that are less than a gap apart as
    one."""
    last: dict[str, Busy] = {}
    found: list[Busy] = []
    for one in sorted(busy, key=lambda one: one.began):
        before = last.get(one.endpoint)
        if before is not None and one.began - before.ended < gap_s:
            last[one.endpoint] = replace(before, ended=max(before.ended, one.ended))
            continue
        if before is not None:
            found.append(before)
        last[one.endpoint] = one
    return [*found, *last.values()]


def covered_s(spans: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Return the seconds of a step that intervals cover together."""
    total, until = 0.0, began
    for begin, end in sorted(spans):
        begin, end = max(begin, until), min(end, ended)
        total, until = total + max(0.0, end - begin), max(until, end)
    return total


Event = Callable[..., None]


@dataclass(frozen=True)
class RunParts:
    """Builds the parts of one run after its actors are loaded."""

    config: Config
    store: RunStore
    mesh: RunMesh
    task: Task
    chat: ChatFormat
    event: Event
    controller_class: ClassVar[type[Controller]] = Controller

    def trainer(self, checkpoint: Checkpoint | None) -> FaultTolerantTrainer:
        """Return the trainer, which survives the deaths of its ranks."""
        config, ranks, teachers = self.config, self.mesh.trainers, self.mesh.teachers
        deadline = config.run.deadline_s
        sync = MeshWeightSync(lambda: ranks.all, self.mesh.generators, teachers, deadline)
        follow = RestoredTeachers(lambda: ranks.all, teachers, deadline) if teachers else None
        keep = self.store.add_divergences
        step = MeshTraining(config, lambda: ranks.all, teachers, keep, self.event)
        return FaultTolerantTrainer(
            config,
            ranks,
            step,
            sync,
            follow,
            self.store.root,
            self.event,
            self._trained_steps,
            checkpoint,
            self.mesh.turns,
        )

    def _trained_steps(self, first: int, until: int) -> list[Trained]:
        step_builder = self._step_builder(self._late_reward)
        return trained_steps(self.store.reading, self.config, step_builder, first, until)

    async def controller(
        self,
        trainer: FaultTolerantTrainer,
        watch: Watcher,
        past: ResumeContents,
        heldout: Sequence[int],
    ) -> Controller:
        """Build the controller of a new or resumed run. Waits until the resumed steps are rebuilt.

        From here on teachers are queried about states that they were not queried about before.
        """
        if self.config.sdpo.alpha:
            await in_thread(load_rules)  # of number words, which hints must not tell
        # Takes seconds, since near-duplicate filters import their library.
        stream = await in_thread(self._pair_stream)
        loop = asyncio.get_running_loop()

        def report(text: str) -> None:
            # Steps are built in a thread, and only the loop's own thread may record events.
            loop.call_soon_threadsafe(self._late_reward, text)

        step_builder = await in_thread(self._step_builder, report)
        resume_state = await in_thread(resume_state_of, past, step_builder)
        if stream is not None:
            restore_teacher_queries(
                past, stream, self.store.reading, self._first_in_window(resume_state)
            )
        ports = Ports(
            self.rollouts(past),
            stream,
            trainer,
            trainer,
            self.store,
            watch,
            trainer.save,
            trainer.saved,
            self._hint_writing(),
            LogprobMismatchMonitor(self.config.logprob_mismatch, self.event),
            self.mesh.judges,
            self.event,
        )
        order = await in_thread(make_episode_order, self.config, self.task, past)
        return self.controller_class(
            self.config, self.task, step_builder, ports, heldout, resume_state, order=order
        )

    def _first_in_window(self, resume_state: ResumeState) -> int:
        steps = resume_state.steps + (resume_state.planned is not None)
        return steps * self.config.schedule.prompts_per_step

    def _late_reward(self, text: str) -> None:
        self.event("late_reward", "", text)

    def _step_builder(self, report: Callable[[str], object]) -> StepBuilder:
        limit_s = self.config.supervision.custom_function_s
        advantages = make_advantages(self.config.advantage, limit_s)
        late = make_late_rewards(self.config, self.store.reading.rewards, advantages, report)
        unwritten = FirstReasons(partial(self.event, "hints_missing", "trainer"))
        batcher = Batcher(self.config, self.task, self.chat, advantages, unwritten)
        return StepBuilder(batcher, late)

    def rollouts(self, past: ResumeContents) -> Rollouts:
        """Return the rollout sampler with the failures of earlier processes of the run."""
        mesh = self.mesh
        pools = RolloutPools(mesh.rollouts, mesh.generators, mesh.environments)
        closed = self.config.schedule.max_lag == 0
        retries = EpisodeRetries(self.config.supervision, self.store.add_poisoned, self.event)
        retries.restore(past.poisoned, past.sizes, self.config.schedule.group_size)
        workers = RolloutWorkers(pools, self.event, lockstep=closed)
        return Rollouts(workers, retries)

    def _pair_stream(self) -> PairStream | None:
        mesh, waiting = self.mesh, self.store.reading.waiting_pairs
        if mesh.replay is None:
            return None
        reference: Any = mesh.reference
        if reference is not None:
            reference = reference.options(deadline_s=self.config.run.deadline_s)
        teachers: Any = mesh.replay  # a service has its actor's endpoints
        return make_pair_stream(self.config, teachers, reference, self.chat, self.store, waiting)

    def _hint_writing(self) -> HintWriting | None:
        if self.mesh.hints is None:
            return None
        report = partial(self.event, "hint_not_worded", "hint_writer")
        return HintWriting(self.mesh.hints, self.config, self.task, self.chat, report)
