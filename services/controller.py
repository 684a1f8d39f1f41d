"""The controller: what happens in a run, and in which order.

Rollouts, replay and training run beside each other. The window decides how far ahead rollouts may
be; steps take groups in the order in which they entered. Everything it touches is a port.

    evaluate -> [ groups -> traces stored -> replay ]  -> batch -> train -> sync -> ... -> evaluate
                  as far ahead as the window allows        one step at a time
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import cancel_and_wait, together
from composer_mesh.rollouts.tasks import Task
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.rollouts.window import Window
from composer_mesh.services.batcher import Batcher
from composer_mesh.services.hint_writing import HintWriting, WordedHints
from composer_mesh.services.metrics import step_metrics
from composer_mesh.services.ports import Store, Training, Watcher, WeightSync
from composer_mesh.services.replay import Replay, Replayed
from composer_mesh.services.report import Evaluation
from composer_mesh.services.rollout import Rollouts, Sampling


@dataclass(frozen=True)
class Ports:
    """The world, as far as a run needs it; `replay` is None when the channel is off.

    `hints` is None where templates alone word the hints.
    """

    rollouts: Rollouts
    replay: Replay | None
    trainer: Training
    weights: WeightSync
    store: Store
    watch: Watcher
    save: Callable[[int], Awaitable[None]]
    hints: HintWriting | None = None


@dataclass(frozen=True)
class Group:
    """One prompt's samples, stored, with what teachers and the hint writer said about them."""

    traces: list[Trace]
    replayed: Replayed
    worded: WordedHints


@dataclass
class Controller:
    """One run. `run()` is the whole story; the rest are its sentences."""

    config: Config
    task: Task
    batcher: Batcher
    ports: Ports
    evaluations: list[Evaluation] = field(default_factory=list)
    step: int = 0
    _running: deque[asyncio.Task[Group]] = field(default_factory=deque)
    _samples: set[asyncio.Task[Trace]] = field(default_factory=set)

    def __post_init__(self) -> None:
        schedule = self.config.schedule
        self._window = Window(schedule.prompts_per_step, schedule.max_lag, self.config.run.steps)

    async def run(self) -> None:
        """Evaluate, train every step, save, evaluate. Waits for the end of the run.

        However it ends, nothing that it started is still under way.
        """
        try:
            await self._evaluate(0)
            self.ports.watch.phase("training")
            for step in range(self.config.run.steps):
                await self._one_step(step)
            await self.ports.save(self.config.run.steps)
            await self._evaluate(self.config.run.steps)
        finally:
            under_way: list[asyncio.Task[Any]] = [*self._running, *self._samples]
            await cancel_and_wait(under_way)

    async def _one_step(self, step: int) -> None:
        began = time.perf_counter()
        self._fill_window()
        groups = [await self._running[place] for place in range(self._prompts)]
        for _ in groups:
            self._running.popleft()
        collected = time.perf_counter()
        traces = [trace for group in groups for trace in group.traces]
        replayed = sum_replayed(groups)
        by_prompt = [group.traces for group in groups]
        batch = self.batcher.batch(step, by_prompt, replayed.pairs, sum_worded(groups))
        trained = await self.ports.trainer.train(batch)
        stepped = time.perf_counter()
        self._window.pulled(await self.ports.weights.sync())
        ended = time.perf_counter()
        metrics = step_metrics(batch, traces, replayed, trained)
        metrics["time/step_s"] = ended - began
        metrics["time/wait_batch_s"] = collected - began
        metrics["time/train_s"] = stepped - collected
        metrics["time/weight_sync_s"] = ended - stepped
        self.step = step + 1
        self.ports.store.add_step(metrics)
        self.ports.watch.update(metrics)
        if self._evaluates_after(step + 1):
            await self._evaluate(step + 1)

    def _evaluates_after(self, steps: int) -> bool:
        """Whether the run pauses to evaluate there; its end has an evaluation of its own."""
        every = self.config.eval.every
        return bool(every) and steps % every == 0 and steps < self.config.run.steps

    def _fill_window(self) -> None:
        """Let every group in that the window allows."""
        while self._window.may_enter():
            group_id = self._window.enter()
            samples = self._start("train", group_id, Sampling.training(self.config))
            self._running.append(asyncio.create_task(self._finish_group(samples)))

    async def _finish_group(self, samples: list[asyncio.Task[Trace]]) -> Group:
        """Waits for a group's samples, stores them, and asks the teachers and the hint writer."""
        traces = await gather_or_cancel(samples)
        self.ports.store.add_traces(traces)
        if self.ports.hints is None:
            return Group(traces, await self._replay(traces), WordedHints())
        return Group(traces, *await together(self._replay(traces), self.ports.hints.ask(traces)))

    async def _replay(self, traces: list[Trace]) -> Replayed:
        if self.ports.replay is None:
            return Replayed()
        replayed = await self.ports.replay.ask(traces)
        self.ports.store.add_pairs(replayed.pairs)
        return replayed

    def _start(self, split: Split, index: int, sampling: Sampling) -> list[asyncio.Task[Trace]]:
        size = self.config.schedule.group_size if split == "train" else 1
        episode = self.task.episode(split, index)
        samples = self.ports.rollouts.start(episode, index, size, sampling)
        self._samples.update(samples)
        for sample in samples:
            sample.add_done_callback(self._samples.discard)
        return samples

    async def _evaluate(self, step: int) -> None:
        """Held-out success of the version served now. Waits for every episode."""
        self.ports.watch.phase(f"evaluating after step {step}")
        sampling = Sampling.evaluation(self.config)
        episodes = range(self.config.eval.episodes)
        started = [task for index in episodes for task in self._start("heldout", index, sampling)]
        traces = await gather_or_cancel(started)
        success = sum(trace.success for trace in traces) / len(traces)
        self.evaluations.append(Evaluation(step, success, len(traces)))
        self.ports.store.add_evaluation(self.evaluations[-1])
        self.ports.watch.evaluation(self.evaluations[-1])

    @property
    def _prompts(self) -> int:
        return self.config.schedule.prompts_per_step


async def gather_or_cancel(tasks: list[asyncio.Task[Trace]]) -> list[Trace]:
    """All results in order; when one fails or the waiting ends, the others are cancelled."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def sum_replayed(groups: Sequence[Group]) -> Replayed:
    total = Replayed()
    for group in groups:
        total += group.replayed
    return total


def sum_worded(groups: Sequence[Group]) -> WordedHints:
    total = WordedHints()
    for group in groups:
        total += group.worded
    return total
