"""The controller: what happens in a run, and in which order.

Rollouts, replay and training run beside each other. The window decides how far ahead rollouts may
be; steps take groups in the order in which they entered. Everything it touches is a port.

    evaluate -> [ groups -> traces stored ] -> batch -> train -> sync -> ... -> evaluate
                  as far ahead as the window    ^         one step at a time
                  allows      |                 |
                              +-> pair stream --+   teachers, filters, reference: beside the steps

Where rollouts may lag, the sync of a version runs beside the next step. The window opens when all
have pulled, and what needs the new version everywhere waits for it: evaluations, checkpoints, the
end. Where they may not, everything waits for everything.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.tasks import Task
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.rollouts.window import Window
from composer_mesh.services.agreement import AgreementWatch
from composer_mesh.services.batcher import Batcher
from composer_mesh.services.hint_writing import HintWriting, WordedHints
from composer_mesh.services.metrics import step_metrics
from composer_mesh.services.ports import Store, Training, Watcher, WeightSync
from composer_mesh.services.replay.asking import Replayed
from composer_mesh.services.replay.late_rewards import Corrections, LateRewards
from composer_mesh.services.replay.pair_stream import PairStream, Taken
from composer_mesh.services.report import Evaluation
from composer_mesh.services.rollout import Rollouts, Sampling
from composer_mesh.services.sync_beside import SyncBeside

Sampled = asyncio.Task[Trace | None]


@dataclass(frozen=True)
class Ports:
    """The world, as far as a run needs it; `replay` is None when the channel is off.

    `hints` is None where templates alone word the hints, `late` where no late rewards are taken,
    `agreement` where nobody watches how far trainer and generators agree.
    """

    rollouts: Rollouts
    replay: PairStream | None
    trainer: Training
    weights: WeightSync
    store: Store
    watch: Watcher
    save: Callable[[int], Awaitable[None]]
    hints: HintWriting | None = None
    late: LateRewards | None = None
    agreement: AgreementWatch | None = None


@dataclass(frozen=True)
class Group:
    """One prompt's samples, stored, with what the hint writer said about them."""

    traces: list[Trace]
    worded: WordedHints


@dataclass
class Controller:
    """One run. `run()` is the whole story; the rest are its sentences."""

    config: Config
    task: Task
    batcher: Batcher
    ports: Ports
    evaluations: list[Evaluation] = field(default_factory=list)
    start: int = 0
    """Steps that were done before; more than 0 where the run is resumed."""
    rest: Replayed = field(default_factory=Replayed)
    """What teachers answered too late for the last step."""
    _running: deque[asyncio.Task[Group]] = field(default_factory=deque)
    _samples: set[Sampled] = field(default_factory=set)

    def __post_init__(self) -> None:
        schedule, self.step = self.config.schedule, self.start
        self._window = Window(
            schedule.prompts_per_step, schedule.max_lag, self.config.run.steps, self.start
        )
        self._syncs = SyncBeside(self.ports.weights, self._pulled)

    async def run(self) -> None:
        """Evaluate, train every step, save, evaluate. Waits for the end of the run.

        However it ends, nothing that it started is still under way.
        """
        try:
            await self._syncs.guard(self._run())
        finally:
            under_way: list[asyncio.Task[Any]] = [*self._running, *self._samples]
            await cancel_and_wait(under_way)
            if self.ports.replay is not None:
                await self.ports.replay.close()

    async def _run(self) -> None:
        await self._begin()
        self.ports.watch.phase("training")
        for step in range(self.start, self.config.run.steps):
            await self._one_step(step)
        await self.ports.save(self.config.run.steps)
        if not self._evaluated(self.config.run.steps):
            await self._evaluate(self.config.run.steps)
        if self.ports.replay is not None:
            self.rest = await self.ports.replay.drain()

    async def _begin(self) -> None:
        """Serve the policy that the run begins with, and evaluate it where that is still due."""
        if self.start:
            self._window.pulled(await self._syncs.now())
        due = not self.start or self._evaluates_after(self.start)
        if due and not self._evaluated(self.start):
            await self._evaluate(self.start)

    def _evaluated(self, steps: int) -> bool:
        return any(evaluation.step == steps for evaluation in self.evaluations)

    async def _one_step(self, step: int) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        self._fill_window()
        groups = await self._collect(step)
        taken = await self._take_pairs(step)
        collected = now()
        await self._syncs.may_train()
        may_train = now()
        batch, traces, corrections = self._batch(step, groups, taken)
        trained = await self.ports.trainer.train(batch)
        stepped = now()
        await self._serve(step + 1)
        metrics = step_metrics(batch, traces, taken, corrections, trained)
        metrics |= self.ports.rollouts.retries.figures()
        metrics["time/step_s"] = now() - began
        metrics["time/wait_batch_s"] = collected - began
        metrics["time/train_s"] = stepped - may_train
        metrics |= self._syncs.metrics()
        self.step = step + 1
        self.ports.store.add_step(metrics)
        self.ports.watch.update(metrics)
        await self._keep(step + 1, metrics)
        if self._evaluates_after(step + 1):
            await self._evaluate(step + 1)

    async def _collect(self, step: int) -> list[Group]:
        """The next groups in the order of entry. Waits for the slowest of them."""
        groups = [await self._running[place] for place in range(self._prompts)]
        for _ in groups:
            self._running.popleft()
        self._check_groups(step, groups)
        return groups

    async def _serve(self, steps: int) -> None:
        """Bring the new version to everyone: beside the next step, or now where that is needed."""
        needed = self._evaluates_after(steps) or steps == self.config.run.steps
        if self.config.schedule.max_lag and not needed:
            await self._syncs.begin()
        else:
            self._window.pulled(await self._syncs.now())

    def _pulled(self, version: int) -> None:
        """A version came to be served beside a step: more groups may enter at once."""
        self._window.pulled(version)
        self._fill_window()

    def _check_groups(self, step: int, groups: Sequence[Group]) -> None:
        sizes = [len(group.traces) for group in groups]
        wanted = self.config.schedule.group_size
        self.ports.rollouts.retries.check_step(step + 1, sizes, wanted)

    async def _take_pairs(self, step: int) -> Taken | None:
        return None if self.ports.replay is None else await self.ports.replay.take(step)

    def _batch(
        self, step: int, groups: Sequence[Group], taken: Taken | None
    ) -> tuple[StepBatch, list[Trace], Corrections]:
        by_prompt, corrections = [group.traces for group in groups], Corrections()
        if (late := self.ports.late) is not None:
            corrections = late.corrections(step)
            by_prompt = late.on_time(by_prompt, step)
            late.remember(step, by_prompt)
        pairs, worded = taken.pairs if taken else [], sum_worded(groups)
        batch = self.batcher.batch(step, by_prompt, pairs, worded, corrections.samples)
        return batch, [trace for group in by_prompt for trace in group], corrections

    async def _keep(self, steps: int, metrics: dict[str, Any]) -> None:
        """Save where it is due. An alarm that ends the run does so here, after a checkpoint."""
        watch = self.ports.agreement
        alarm = watch.judge(metrics) if watch is not None else None
        if alarm is not None or self._saves_after(steps):
            await self._syncs.finish()
            await self.ports.save(steps)
        if alarm is not None:
            raise alarm

    def _saves_after(self, steps: int) -> bool:
        """Whether a restart can begin again there; the run's end has a checkpoint of its own."""
        every = self.config.trainer.checkpoint_every
        return bool(every) and steps % every == 0 and steps < self.config.run.steps

    def _evaluates_after(self, steps: int) -> bool:
        """Whether the run pauses to evaluate there; its end has an evaluation of its own."""
        every = self.config.eval.every
        return bool(every) and steps % every == 0 and steps < self.config.run.steps

    def _fill_window(self) -> None:
        """Let every group in that the window allows."""
        while self._window.may_enter():
            group_id = self._window.enter()
            samples = self._start("train", group_id, Sampling.training(self.config))
            self._running.append(asyncio.create_task(self._finish_group(group_id, samples)))

    async def _finish_group(self, group_id: int, samples: list[Sampled]) -> Group:
        """Waits for a group's samples, stores them, and asks the hint writer.

        Teachers are asked from here on, but nobody waits for them here. A group may have come with
        fewer samples, or none.
        """
        traces = await gather_or_cancel(samples)
        self.ports.store.add_traces(traces)
        if self.ports.replay is not None and traces:
            self.ports.replay.begin(traces)
        elif self.ports.replay is not None:
            self.ports.replay.skip(group_id)
        if self.ports.hints is None or not traces:
            return Group(traces, WordedHints())
        return Group(traces, await self.ports.hints.ask(traces))

    def _start(self, split: Split, index: int, sampling: Sampling) -> list[Sampled]:
        size = self.config.schedule.group_size if split == "train" else 1
        episode = self.task.episode(split, index)
        samples = self.ports.rollouts.start(episode, index, size, sampling)
        self._samples.update(samples)
        for sample in samples:
            sample.add_done_callback(self._samples.discard)
        return samples

    async def _evaluate(self, step: int) -> None:
        """Held-out success of the version served now, over the episodes that could be run.

        Waits for every episode.
        """
        self.ports.watch.phase(f"evaluating after step {step}")
        sampling = Sampling.evaluation(self.config)
        episodes = range(self.config.eval.episodes)
        started = [task for index in episodes for task in self._start("heldout", index, sampling)]
        traces = await gather_or_cancel(started)
        self.ports.rollouts.retries.check_evaluation(step, len(traces), len(started))
        success = sum(trace.success for trace in traces) / len(traces)
        self.evaluations.append(Evaluation(step, success, len(traces)))
        self.ports.store.add_evaluation(self.evaluations[-1])
        self.ports.watch.evaluation(self.evaluations[-1])

    @property
    def _prompts(self) -> int:
        return self.config.schedule.prompts_per_step


async def gather_or_cancel(tasks: list[Sampled]) -> list[Trace]:
    """The traces in order, without those that were given up.

    When a sample fails for good or the waiting ends, the others are cancelled.
    """
    try:
        return [trace for trace in await asyncio.gather(*tasks) if trace is not None]
    finally:
        for task in tasks:
            task.cancel()


def sum_worded(groups: Sequence[Group]) -> WordedHints:
    total = WordedHints()
    for group in groups:
        total += group.worded
    return total
