"""The controller: schedules a run's rollouts, training steps, weight syncs and evaluations.

Rollouts, teacher replay and training run concurrently. The rollout window bounds how far ahead
rollouts may be; steps take groups in order of entry, except those that they pass over, and with
dynamic sampling more of them for those that they drop. Everything external is behind a port.

    evaluate -> [ groups -> traces stored ] -> step planned -> train -> sync -> ... -> evaluate
                  as far ahead as the window    ^              one step at a time
                  allows      |                 |
                              +-> pair stream --+   teachers, filters, reference: concurrent

Everything is written before it is used, so that a run stopped at any point can resume without loss:
`resume_state` holds the finished steps, a planned step, and stored groups.

Where rollouts may lag, the sync of a version runs concurrently with the next step. The window opens
when all receivers have pulled, and what needs the new version everywhere waits for it: evaluations,
checkpoints, the end. Where they may not lag, every stage waits for the previous one.

A stop request is honoured between steps and during waits: finished steps are then checkpointed, and
a resume does the rest. Judges whose ceiling is reached end a run in the same way, with an error.

Background syncs run one at a time:

    loop    train | collect ..... may train? | train ............ | finish? | train
    sync           hold | copy ----> | pulls of all ----> served |           hold | copy ...

A sync that fails ends the work that it runs concurrently with, raising its own failure there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait, in_thread, unless
from composer_mesh.rollouts.curriculum import EpisodeOrder
from composer_mesh.rollouts.window import Window
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.replay.pair_stream import PairStream, TakenPairs
from composer_mesh.services.schedule.groups import Groups, ResumeState
from composer_mesh.services.schedule.metrics import replay_metrics, success_of_tasks, sync_metrics
from composer_mesh.services.schedule.outlook import Outlook
from composer_mesh.services.schedule.step_builder import (
    PlannedStep,
    StepBuilder,
    StepGroups,
    carried_text,
)
from composer_mesh.services.schedule.stopping import Stopping, StopRequested
from composer_mesh.services.steps.hint_writing import HintWriting
from composer_mesh.services.steps.logprob_mismatch import LogprobMismatchMonitor
from composer_mesh.services.steps.ports import JudgeCosts, Store, Training, Watcher, WeightSync
from composer_mesh.services.steps.step_manifest import ReplayOutcome, manifest_to_json
from composer_mesh.tasks.errors import JudgesSpent
from composer_mesh.tasks.task import Task

T = TypeVar("T")


class AsyncWeightSync:
    """Run the weight syncs of one run. `served` is called with each version served by a background
    sync."""

    def __init__(self, weights: WeightSync, served: Callable[[int], None]) -> None:
        self._weights, self._served = weights, served
        self._task: asyncio.Task[None] | None = None
        self._may_train = asyncio.Event()
        self._failed: asyncio.Future[BaseException] | None = None
        self._waited_s = self._took_s = 0.0

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` with syncs in the background; raise a sync's failure at once if one fails.

        However it ends, no sync is under way afterwards.
        """
        self._failed = asyncio.get_running_loop().create_future()
        try:
            return await unless(work, [self._failed], self._failed.result)
        finally:
            await cancel_and_wait([self._task] if self._task else [])

    async def begin(self) -> None:
        """Start a background sync of the newest version. Waits for the previous sync first."""
        await self.finish()
        self._may_train = asyncio.Event()
        self._task = asyncio.create_task(self._sync_in_background(self._may_train))

    async def now(self) -> int:
        """Sync the newest version, wait until it is served, and return it."""
        await self.finish()
        began = _now()
        version = await self._weights.sync()
        took_s = _now() - began
        self._took_s += took_s
        self._waited_s += took_s
        return version

    async def on_snapshot(self) -> None:
        """Wait until the running sync, if any, has its snapshot: the next step may then train."""
        if self._task is not None:
            await self._wait(self._may_train.wait())

    async def finish(self) -> None:
        """Wait for the running sync, if any, to finish; raises its failure."""
        if self._task is not None:
            await self._wait(self._task)
            self._task = None

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of the syncs that ended since the last call."""
        found = sync_metrics(self._waited_s, self._took_s)
        self._waited_s = self._took_s = 0.0
        return found

    async def _sync_in_background(self, on_snapshot: asyncio.Event) -> None:
        began = _now()
        try:
            version = await self._weights.sync(on_snapshot.set)
            self._took_s += _now() - began
            self._served(version)
        except Exception as error:
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(error)
            raise
        finally:
            on_snapshot.set()

    async def _wait(self, until: Awaitable[Any]) -> None:
        """Wait for `until` or for the running sync's failure, and count the time waited."""
        assert self._task is not None
        began = _now()
        try:
            await until
            if self._task.done():
                self._task.result()
        finally:
            self._waited_s += _now() - began


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Ports:
    """The ports of a run; `replay` is None when the channel is off.

    `save` returns when a checkpoint's bytes are copied, `saved` when they are on disk. `hints` is
    None where hints come from templates only, `logprob_mismatch` where the log-prob mismatch of
    trainer and generators is not monitored, `judges` where there are none. `in_thread` runs
    blocking work alongside the event loop.
    """

    rollouts: Rollouts
    replay: PairStream | None
    trainer: Training
    weights: WeightSync
    store: Store
    watch: Watcher
    save: Callable[[int], Awaitable[None]]
    saved: Callable[[], Awaitable[None]]
    hints: HintWriting | None = None
    logprob_mismatch: LogprobMismatchMonitor | None = None
    judges: JudgeCosts | None = None
    event: Callable[[str, str, str], None] | None = None
    """Records an event (kind, actor, text) and shows it; without it, they are recorded alone."""
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = in_thread


@dataclass
class Controller:
    """One run, from its first evaluation to its last; `run()` is the entry point."""

    config: Config
    task: Task
    step_builder: StepBuilder
    ports: Ports
    heldout: Sequence[int]
    """Indices of the episodes of an evaluation, each problem once."""
    resume_state: ResumeState = field(default_factory=ResumeState)
    rest: ReplayOutcome = field(default_factory=ReplayOutcome)
    """Outcome of the teacher answers that arrived too late for the last step."""
    judge_rest: dict[str, float] = field(default_factory=dict)
    """Figures of the judges after the last step."""
    stopping: Stopping = field(default_factory=Stopping)
    order: EpisodeOrder = field(default_factory=EpisodeOrder)
    """Chooses the episodes of training groups."""

    def __post_init__(self) -> None:
        schedule, resume_state = self.config.schedule, self.resume_state
        self.step, self.evaluations = resume_state.steps, list(resume_state.evaluations)
        self._planned = resume_state.planned
        self._saved = 0 if resume_state.checkpoint is None else resume_state.checkpoint.step
        self._window = Window(
            schedule.prompts_per_step,
            schedule.max_lag,
            self.config.run.steps,
            resume_state.steps,
            planned=resume_state.planned is not None,
            taken=resume_state.next_group,
            carried=resume_state.carried,
            groups_per_step=schedule.groups_per_step,
        )
        self._outlook = Outlook(self.config, self.channels)
        self._event = self.ports.event or self.ports.store.add_event
        self._syncs = AsyncWeightSync(self.ports.weights, self._pulled)
        ports = self.ports
        self._groups = Groups(
            self.config,
            self.task,
            ports.rollouts,
            ports.store,
            ports.replay,
            ports.hints,
            resume_state.groups,
            self.heldout,
            self._replace,
            self.order,
        )

    @property
    def channels(self) -> list[str]:
        """Names of the channels that the run trains."""
        return self.config.configured_channels

    async def run(self) -> None:
        """Evaluate, train every step, save, evaluate. Waits for the end of the run, or for a stop.

        However it ends, nothing that it started is still running.
        """
        self.stopping.finishes_step = True
        try:
            await self._syncs.guard(self._run())
        finally:
            self.stopping.mark_over()
            await self._groups.close()
            await self.ports.rollouts.close()
            if self.ports.replay is not None:
                await self.ports.replay.close()
            await self.stopping.close()

    async def _run(self) -> None:
        try:
            await self._to_the_end()
        except StopRequested:
            await self._leave()
        except JudgesSpent:
            await self._keep_finished()
            raise

    async def _to_the_end(self) -> None:
        await self._begin()
        self.ports.watch.phase("training")
        for step in range(self.resume_state.steps, self.config.run.steps):
            self.stopping.check()
            await self._one_step(step)
        await self._save(self.config.run.steps)
        if not self._evaluated(self.config.run.steps):
            await self._evaluate(self.config.run.steps)
        if self.ports.replay is not None:
            self.rest = await self.ports.replay.drain()
        late = replay_metrics(self.step, TakenPairs([], self.rest))
        self._warn(self._outlook.at_end(late, self.rest.reasons))
        await self.ports.saved()
        await self._count_judges()

    def _warn(self, found: Iterable[tuple[str, str]]) -> None:
        for kind, text in found:
            self._event(kind, "", text)

    async def _leave(self) -> None:
        """Write what is done to disk, so that a resume need not repeat it."""
        await self._keep_finished()
        self.stopping.left()

    async def _keep_finished(self) -> None:
        self.ports.watch.phase("writing a checkpoint, to stop")
        await self._syncs.finish()
        if self.step > self._saved:
            await self._save(self.step)
        await self.ports.saved()
        await self._count_judges()

    async def _count_judges(self) -> None:
        if self.ports.judges is not None:
            self.judge_rest = await self.ports.judges.figures()

    async def _save(self, steps: int) -> None:
        await self.ports.save(steps)
        self._saved = steps

    async def _begin(self) -> None:
        """Serve the initial policy of the run; save and evaluate it where that is due."""
        start = self.resume_state.steps
        # An island may start from the others' weights; processes that share GPUs wait for a turn.
        if start or self.config.islands.on or self.config.placement.colocate:
            self._window.pulled(await self._syncs.now())
        if self._saves_after(start) and start > self._saved:
            await self._save(start)
        due = not start or self._evaluates_after(start)
        if due and not self._evaluated(start):
            await self._evaluate(start)

    def _evaluated(self, steps: int) -> bool:
        return any(evaluation.step == steps for evaluation in self.evaluations)

    async def _one_step(self, step: int) -> None:
        began = _now()
        self._fill_window()
        composed = await self._planned_step(step)
        collected = _now()
        await self._syncs.on_snapshot()
        on_snapshot = _now()
        trained = await self.ports.trainer.train(composed.batch)
        stepped = _now()
        await self._serve(step + 1)
        metrics = composed.metrics(trained)
        metrics["time/step_s"] = _now() - began
        metrics["time/wait_batch_s"] = collected - began
        metrics["time/train_s"] = stepped - on_snapshot
        metrics |= self._syncs.metrics() | self.ports.store.waits()
        metrics |= self.ports.rollouts.cached_prompts()
        if self.ports.judges is not None:
            metrics |= await self.ports.judges.figures()
        self.step = step + 1
        await self.ports.store.end_step(step, metrics)
        self.ports.watch.update(metrics)
        outcome = composed.taken.replay_outcome if composed.taken else ReplayOutcome()
        self._warn(self._outlook.after(metrics, outcome.reasons))
        await self._keep(step + 1, metrics)
        if self._evaluates_after(step + 1):
            await self._evaluate(step + 1)

    async def _planned_step(self, step: int) -> PlannedStep:
        """Build the step's batch and write its manifest. Waits for its groups."""
        if self._planned is not None:
            planned, self._planned = self._planned, None
            return planned
        groups = await self._collect(step)
        taken = await self._take_pairs(step)
        results = self.order.results((n.group_id, n.traces) for n in groups.all)
        self.order.settle(step, results)
        counts = self.ports.rollouts.retries.figures() | self._groups.figures()
        figures = {**counts, **groups.figures(), **self.order.figures(results)}
        if self.config.schedule.carried_groups:
            figures["rollouts/carried"] = self._window.carried
        dropped = [group.group_id for group in groups.dropped]
        # Long steps take tenths of a second. Nothing else uses the builder meanwhile.
        compose = partial(
            self.step_builder.compose, step, groups.kept, taken, figures, dropped, results
        )
        composed, manifest = await self.ports.in_thread(compose)
        await self.ports.store.plan_step(
            step,
            manifest.groups,
            manifest_to_json(manifest),
            manifest.pairs,
            self.config.replay.max_age if taken else None,
            {reward.place: state for reward, state in composed.corrections.settled},
        )
        return composed

    async def _collect(self, step: int) -> StepGroups:
        """Return the step's groups, with others for those that it drops. Waits for them."""
        groups = StepGroups(self.config.schedule, step)
        while wanted := groups.wanted:
            groups.take(await self.stopping.unless(self._groups.collect(wanted)))
            for group in groups.dropped:
                self._window.drop(group.group_id)
            self._fill_window()
        known = self._window.next_group
        self._window.took([group.group_id for group in groups.all])
        passed = [n for n in self._groups.running if known <= n < self._window.next_group]
        if passed:
            self._event("groups_carried", "", carried_text(step, passed, self._window.carried))
        self._fill_window()
        self.ports.rollouts.retries.check_step(
            step + 1, groups.sizes, self.config.schedule.group_size
        )
        if groups.missing:
            self._event("groups_missing", "", groups.shortage())
        return groups

    def _replace(self, group_id: int) -> None:
        """Start another group for one that will be dropped, where rollouts may run ahead.

        The closed batches of a synchronous run are refilled once all of their groups are finished.
        """
        if self.config.schedule.max_lag:
            self._window.drop(group_id)
            self._fill_window()

    async def _serve(self, steps: int) -> None:
        """Sync the new version: concurrently with the next step, or before it where required."""
        needed = self._evaluates_after(steps) or steps == self.config.run.steps
        if self.config.schedule.max_lag and not needed:
            await self._syncs.begin()
        else:
            self._window.pulled(await self._syncs.now())

    def _pulled(self, version: int) -> None:
        """Open the window for a version that a background sync has served; start more groups."""
        self._window.pulled(version)
        self._fill_window()

    async def _take_pairs(self, step: int) -> TakenPairs | None:
        if self.ports.replay is None:
            return None
        return await self.stopping.unless(self.ports.replay.take(step, self._window.next_group))

    async def _keep(self, steps: int, metrics: dict[str, Any]) -> None:
        """Save where it is due. An alarm that ends the run is raised here, after a checkpoint."""
        watch = self.ports.logprob_mismatch
        alarm = watch.judge(metrics) if watch is not None else None
        if alarm is not None or self._saves_after(steps):
            await self._syncs.finish()
            await self._save(steps)
        if alarm is not None:
            await self.ports.saved()
            raise alarm

    def _saves_after(self, steps: int) -> bool:
        """Whether a checkpoint is due after this step; the run's end has its own."""
        every = self.config.trainer.checkpoint_every
        return bool(every) and steps % every == 0 and steps < self.config.run.steps

    def _evaluates_after(self, steps: int) -> bool:
        """Whether an evaluation is due after this step; the run's end has its own."""
        every = self.config.eval.every
        return bool(every) and steps % every == 0 and steps < self.config.run.steps

    def _fill_window(self) -> None:
        """Start every group that the window allows."""
        entering = []
        while self._window.may_enter():
            entering.append(self._window.enter())
        self._groups.enter(entering, self._window.version)

    async def _evaluate(self, step: int) -> None:
        """Measure the held-out success of the served version, over the episodes that could be run.

        No episode counts twice. Waits for every one.
        """
        self.ports.watch.phase(f"evaluating after step {step}")
        began = _now()
        traces = await self.stopping.unless(self._groups.evaluate())
        self.ports.rollouts.retries.check_evaluation(step, len(traces), len(self.heldout))
        self._outlook.evaluated(_now() - began)
        success = sum(trace.success for trace in traces) / len(traces)
        temperature, of_tasks = self.config.eval.temperature, success_of_tasks(traces)
        found = Evaluation(step, success, len(traces), of_tasks, temperature)
        self.evaluations.append(found)
        self.ports.store.add_evaluation(found)
        self.ports.watch.evaluation(found)
