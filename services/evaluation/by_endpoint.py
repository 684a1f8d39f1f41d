"""Evaluates an OpenAI-compatible endpoint: episodes run in this process, actions come by HTTP.

What is stored are traces without tokens: the conversations and how they were scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import (
    ProviderAuthError,
    ProviderBudgetError,
    ProviderError,
    ProviderPaymentError,
)
from composer_mesh.actors.provider.meter import Meter
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.episode import seed_of
from composer_mesh.rollouts.group_rewards import (
    SMALLEST_GROUP,
    FinishedRollout,
    GroupScore,
    with_group_score,
    without_left_out,
)
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import ErrorSite, Trace
from composer_mesh.services.checks.timed_episode import in_a_daemon_thread
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.errors import JudgesSpent, TaskError
from composer_mesh.tasks.group_scoring import score_group
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskLoop

T = TypeVar("T")
SEEDS = 2**31
"""Seeds are below this: some servers take 32 bits."""


class EndpointEvaluation:
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
        self._config, self._task, self._store = config, task, store
        self._client, self._endpoint, self._samples = client, endpoint, samples
        self._limit_s = config.environment.call_s
        self._loop, self._calls = TaskLoop(), Calls(in_a_daemon_thread, self._limit_s)
        self._meter = meter
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self.failures: list[str] = []
        """What each sample without a result failed with."""
        self.usd = 0.0
        """Dollars that the endpoint has stated."""

    async def run(self, indices: Sequence[int]) -> None:
        """Play and store these episodes. Waits for all.

        Raises where the key is refused, no credit or budget is left, or the task blocks its event
        loop.
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
        scoring = self._group_scored(index, group)
        return with_group_score(whole, await self._run(scoring), task.reward_weights)

    async def _group_scored(self, index: int, group: list[FinishedRollout]) -> GroupScore:
        return await score_group(self._task, await self._episode(index), group, self._calls)

    async def _sample(self, index: int, number: int) -> Trace | None:
        async with self._slots:
            try:
                return await self._play(index, number)
            except (ProviderAuthError, ProviderPaymentError, ProviderBudgetError, JudgesSpent):
                raise
            except ProviderError as error:
                self.failures.append(worded(self._endpoint, error))
            except TaskError as error:
                self.failures.append(str(error))
        return None

    async def _play(self, index: int, number: int) -> Trace:
        name = f"heldout-{index:06d}-{number:03d}"
        running = await self._run(self._begun(index))
        sites: list[ErrorSite] = []
        try:
            done, turn = False, 0
            while not done:
                seed = seed_of(self._config.run.seed, f"{name}-{turn:02d}") % SEEDS
                answer = await self._client.complete(
                    *(self._endpoint, running.messages, self._task.tools),
                    seed=seed,
                    meter=self._meter,
                )
                self.usd += answer.usd
                step = await self._run(running.step(answer.action_text))
                sites += [step.error] if step.error is not None else []
                done, turn = step.done, turn + 1
            outcome = await self._run(running.outcome())
        finally:
            await self._run(running.close())
        return Trace(
            name,
            index,
            number,
            self._task.name,
            "heldout",
            index,
            [],
            outcome.messages,
            outcome.reward,
            outcome.success,
            sites,
            dict(outcome.rewards),
            outcome.answer,
            penalty=outcome.penalty,
            left_out=list(outcome.left_out),
        )

    async def _begun(self, index: int) -> RunningEpisode:
        running = RunningEpisode(self._task, await self._episode(index), self._calls)
        await running.begin()
        return running

    async def _episode(self, index: int) -> Episode:
        what = f"making heldout episode {index} of task {self._task.name!r}"
        episode: Episode = await self._calls(what, self._task.episode, "heldout", index)
        return episode

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._loop.run(work, self._limit_s)


def worded(endpoint: TeacherEndpoint, error: ProviderError) -> str:
    """Return what an endpoint failed with, and what to look at in this command."""
    if isinstance(error, ProviderBudgetError):
        return f"{error.text}: raise --max-usd, and go on with --resume"
    return (
        f"{endpoint.base_url}, model {endpoint.model!r}: {error.text}: check that it answers, and "
        "--model, --api-key-env, --max-tokens and --timeout"
    )
