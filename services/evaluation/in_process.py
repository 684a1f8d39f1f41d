"""Plays the held-out episodes of an evaluation in this process; who acts, a subclass says.

What is stored are traces without tokens: the conversations and how they were scored.

Evaluates an OpenAI-compatible endpoint: episodes run in this process, actions come by HTTP.

Evaluates a scripted policy: a task's own gold actions, or empty answers.

It says whether the task accepts what solves it and refuses what does not.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import (
    ProviderAuthError,
    ProviderBudgetError,
    ProviderError,
    ProviderPaymentError,
)
from composer_mesh.actors.provider.money import Meter
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.episode import seed_of
from composer_mesh.rollouts.tasks import (
    SMALLEST_GROUP,
    Episode,
    FinishedRollout,
    with_group_score,
    without_left_out,
)
from composer_mesh.rollouts.traces import ErrorSite, Trace
from composer_mesh.services.checks.task import in_a_daemon_thread
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import JudgesSpent, TaskError
from composer_mesh.tasks.running import RunningEpisode, score_group
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskLoop

T = TypeVar("T")

Policy = Callable[[RunningEpisode, int], Awaitable[str]]
"""Returns the text of the action at a turn of an episode."""


class InProcessEvaluation(ABC):
    """Plays held-out episodes on one event loop, `concurrency` of them at once."""

    def __init__(
        self, config: Config, task: Task, store: Store, samples: int, concurrency: int
    ) -> None:
        self._config, self._task, self._store = config, task, store
        self._samples = samples
        self._limit_s = config.environment.call_s
        self._loop, self._calls = TaskLoop(), TaskCalls(in_a_daemon_thread, self._limit_s)
        self._slots = asyncio.Semaphore(concurrency)
        self.failures: list[str] = []
        """What each sample without a result failed with."""

    @abstractmethod
    async def _policy(self, episode: Episode, name: str) -> Policy:
        """Return who acts in a sample; `name` is that of its trace."""

    def failure_of(self, error: Exception) -> str:
        """Return what a sample, or all of them, failed with."""
        return str(error)

    async def run(self, indices: Sequence[int]) -> None:
        """Play and store these episodes. Waits for all.

        Raises what `_sample` raises, and where the task blocks its event loop.
        """
        groups = [asyncio.create_task(self._group(index)) for index in indices]
        try:
            await asyncio.gather(*groups)
        finally:
            await cancel_and_wait(groups)

    async def _group(self, index: int) -> None:
        """Play the samples of an episode; it is stored if any of them has a result."""
        self._store.enter(index, 0)
        found = await asyncio.gather(*(self._sample(index, n) for n in range(self._samples)))
        traces = [trace for trace in found if trace is not None]
        if not traces:
            return
        try:
            await self._store.add_group(index, await self._comparable(index, traces))
        except JudgesSpent:
            raise
        except TaskError as error:
            self.failures += [str(error)] * len(traces)

    async def _comparable(self, index: int, traces: list[Trace]) -> list[Trace]:
        """Return an episode's samples with their group rewards, which two or more of them have."""
        task = self._task.of(traces[0].task)
        whole = without_left_out(traces, task.reward_weights)
        if not task.group_rewards or len(whole) < SMALLEST_GROUP:
            return whole
        group = [FinishedRollout.of(trace) for trace in whole]
        scoring = score_group(self._task, await self._episode(index), group, self._calls)
        return with_group_score(whole, await self._run(scoring), task.reward_weights)

    async def _sample(self, index: int, number: int) -> Trace | None:
        """Play one sample; None if the task's code failed. Raises where no judge may be called."""
        async with self._slots:
            try:
                return await self._play(index, number)
            except JudgesSpent:
                raise
            except TaskError as error:
                self.failures.append(str(error))
        return None

    async def _play(self, index: int, number: int) -> Trace:
        name = f"heldout-{index:06d}-{number:03d}"
        episode = await self._episode(index)
        policy = await self._policy(episode, name)
        running = RunningEpisode(self._task, episode, self._calls)
        await self._run(running.begin())
        sites: list[ErrorSite] = []
        try:
            done, turn = False, 0
            while not done:
                step = await self._run(running.step(await policy(running, turn)))
                sites += [step.error] if step.error is not None else []
                done, turn = step.done, turn + 1
            outcome = await self._run(running.outcome())
        finally:
            await self._run(running.close())
        return Trace(
            name,
            index,
            number,
            episode.task,
            "heldout",
            index,
            [],
            outcome.messages,
            outcome.reward,
            outcome.success,
            sites,
            dict(outcome.rewards),
            outcome.answer,
            advantage=0.0 if outcome.screened else None,
            penalty=outcome.penalty,
            left_out=list(outcome.left_out),
            screened=outcome.screened,
        )

    async def _episode(self, index: int) -> Episode:
        what = f"making heldout episode {index} of task {self._task.name!r}"
        return await self._run(self._calls(what, self._task.episode, "heldout", index))

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._loop.run(work, self._limit_s)


SEEDS = 2**31
"""Seeds are below this: some servers take 32 bits."""


class EndpointEvaluation(InProcessEvaluation):
    """Plays held-out episodes against one endpoint, on one event loop."""

    def __init__(
        self,
        config: Config,
        task: Task,
        store: Store,
        client: ProviderClient,
        endpoint: TeacherEndpoint,
        samples: int,
        meter: Meter | None = None,
    ) -> None:
        """A `meter` refuses requests that might pass its ceiling."""
        super().__init__(config, task, store, samples, endpoint.concurrency)
        self._client, self._endpoint, self._meter = client, endpoint, meter
        self.usd = 0.0
        """Dollars that the endpoint has stated."""

    async def _sample(self, index: int, number: int) -> Trace | None:
        """Play one sample; None if it failed.

        Raises where the key is refused, or no credit or budget is left.
        """
        try:
            return await super()._sample(index, number)
        except (ProviderAuthError, ProviderPaymentError, ProviderBudgetError):
            raise
        except ProviderError as error:
            self.failures.append(self.failure_of(error))
        return None

    def failure_of(self, error: Exception) -> str:
        """Return what the endpoint failed with, and what to look at in this command."""
        if isinstance(error, ProviderBudgetError):
            return f"{error.text}: raise --max-usd, and continue with --resume"
        if not isinstance(error, ProviderError):
            return str(error)
        return (
            f"{self._endpoint.base_url}, model {self._endpoint.model!r}: {error.text}: check that "
            "it answers, and --model, --api-key-env, --max-tokens and --timeout"
        )

    async def _policy(self, _episode: Episode, name: str) -> Policy:
        async def ask(running: RunningEpisode, turn: int) -> str:
            seed = seed_of(self._config.run.seed, f"{name}-{turn:02d}") % SEEDS
            answer = await self._client.complete(
                *(self._endpoint, running.messages, self._task.tools), seed=seed, meter=self._meter
            )
            self.usd += answer.usd
            return answer.action_text

        return ask


Script = Literal["gold", "empty"]
AT_ONCE = 8


class ScriptedEvaluation(InProcessEvaluation):
    """Plays held-out episodes by the task's gold actions, or by empty answers."""

    def __init__(self, config: Config, task: Task, store: Store, script: Script) -> None:
        super().__init__(config, task, store, 1, AT_ONCE)
        self._script = script

    async def _policy(self, episode: Episode, _name: str) -> Policy:
        actions: list[str] = []
        if self._script == "gold":
            task = self._task.of(episode.task)
            what = f"the gold actions of task {task.name!r}"
            actions = list(await self._run(self._calls(what, task.gold, episode.payload)))

        async def act(_running: RunningEpisode, turn: int) -> str:
            return actions[turn] if turn < len(actions) else ""

        return act
