"""Runs an evaluation, by the actors of a run or in this process, and reports what is stored.

Episodes that are stored already are not played again. In this process act

    an endpoint  OpenAI-compatible, which gives actions by HTTP
    a script     the task's own gold actions, or empty answers: whether the task accepts what solves
                 it and refuses what does not

and what is stored are traces without tokens: the conversations and how they were scored.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from rich.console import Console

from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderAuthError,
    ProviderBudgetError,
    ProviderError,
    ProviderPaymentError,
)
from composer_mesh.actors.provider.money import Meter
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.episode import seed_of
from composer_mesh.rollouts.tasks import (
    SMALLEST_GROUP,
    Episode,
    FinishedRollout,
    with_group_score,
    without_left_out,
)
from composer_mesh.rollouts.traces import ErrorSite, Trace
from composer_mesh.services.checks.local_judges import local_judges
from composer_mesh.services.checks.scripted import Script
from composer_mesh.services.checks.task import in_a_daemon_thread
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.evaluation.report import (
    evaluation_json,
    evaluation_table,
    figures_by_task,
    write_json,
)
from composer_mesh.services.evaluation.target import EvalRefused
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.schedule.stopping import CommandSignals, until_interrupted
from composer_mesh.services.steps.ports import Store
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import JudgesSpent, TaskError
from composer_mesh.tasks.running import RunningEpisode, score_group
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopBlocked, TaskLoop

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


FAILED = 1
LEDGER_FILE = "evaluation.sqlite"


def left_of(output: Path, indices: Sequence[int]) -> list[int]:
    """Return the episodes that are not stored yet."""
    if not (output / STORE_FILE).is_file():
        return list(indices)
    with RunReader(output) as reader:
        stored = {row.group_id for row in reader.groups() if row.traces}
    return [index for index in indices if index not in stored]


def evaluate_by_mesh(
    config: Config, output: Path, left: Sequence[int], samples: int, signals: CommandSignals
) -> int:
    """Play episodes by the actors of a run; the exit status is that of a run."""
    # It loads torch and Monarch.
    from composer_mesh.services.evaluation.by_mesh import EvaluationRun

    signals.check()
    with ExitStack() as stack:
        store = stack.enter_context(RunStore(output, config))
        view = stack.enter_context(RunView(config.run.name, 1))
        run = EvaluationRun(config, store, view, indices=left, samples=samples)
        code = run.settled(asyncio.run(until_interrupted(run.live(), signals, run.stopping)))
    if code == FAILED:
        sys.stderr.write(f"composer-mesh: {run.failure}\n")
    return code


def evaluate_in_process(
    config: Config,
    task: Task,
    output: Path,
    left: Sequence[int],
    samples: int,
    actor: TeacherEndpoint | Script,
    signals: CommandSignals,
    *,
    timeout_s: float,
    max_usd: float | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> int:
    """Play episodes in this process; the exit status is 1 where none of them could be played.

    With `max_usd` no request is sent that might cost more in all, over all commands that continued
    in this directory; the endpoint needs prices. `transport` replaces the network.
    """
    signals.hold()

    async def play(store: RunStore) -> int:
        if not isinstance(actor, TeacherEndpoint):
            return await _played(ScriptedEvaluation(config, task, store, actor), left, samples)
        async with (
            _meter(output, actor, max_usd) as meter,
            ProviderClient(Timeouts(timeout_s, line_s=float("inf")), transport=transport) as client,
        ):
            evaluation = EndpointEvaluation(config, task, store, client, actor, samples, meter)
            return await _played(evaluation, left, samples)

    try:
        with RunStore(output, config) as store, local_judges(config, task, output, transport):
            return asyncio.run(until_interrupted(play(store), signals))
    except ProviderError as error:
        raise EvalRefused(error.for_role("judge", "judges")) from None


@asynccontextmanager
async def _meter(
    output: Path, endpoint: TeacherEndpoint, max_usd: float | None
) -> AsyncIterator[LedgerMeter | None]:
    """Open the ledger of an evaluation; None where it has no ceiling."""
    if max_usd is None:
        yield None
        return
    ledger = await asyncio.to_thread(
        Ledger, output / LEDGER_FILE, BudgetRules(usd=max_usd), endpoint.name
    )
    async with aclosing(LedgerMeter(ledger)) as meter:
        yield meter


async def _played(evaluation: InProcessEvaluation, left: Sequence[int], samples: int) -> int:
    """Play episodes, print what failed and what it cost; return the exit status."""
    try:
        await evaluation.run(left)
        code = FAILED if len(evaluation.failures) == len(left) * samples > 0 else 0
    except (ProviderError, JudgesSpent, LoopBlocked) as error:
        evaluation.failures.append(evaluation.failure_of(error))
        code = FAILED
    if evaluation.failures:
        last = plain_text(evaluation.failures[-1])
        failed = f"{len(evaluation.failures):,} samples failed"
        sys.stderr.write(f"composer-mesh: {failed}, the last one: {last}\n")
    if isinstance(evaluation, EndpointEvaluation) and evaluation.usd:
        Console().print(f"${evaluation.usd:.4f} by the figures of the endpoint", highlight=False)
    return code


def report(
    output: Path,
    about: Mapping[str, Any],
    indices: Sequence[int],
    samples: int,
    json_file: Path | None,
) -> None:
    """Print the table of what is stored, and write it as JSON; raises EvalRefused."""
    traces = _stored(output, set(indices))
    figures = figures_by_task(traces)
    failed = len(indices) * samples - len(traces)
    console = Console()
    if figures:
        shown = f"held-out episodes of {plain_text(str(about['target']))}, with 95 % intervals"
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
        console.print(evaluation_table(figures))
    if failed:
        left = f"{failed:,} of {len(indices) * samples:,} samples have no result and count nowhere"
        console.print(f"{left}: --resume plays episodes without any again", highlight=False)
    shown = f"traces: composer-mesh traces {output}"
    console.print(shown, markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        try:
            write_json(json_file, evaluation_json(about, figures, failed))
        except OSError as error:
            raise EvalRefused(
                f"--report {json_file} cannot be written ({error.strerror}): name another file"
            ) from None


def tell_of_groups(task: Task, samples: int) -> None:
    """Say which rewards are left out because an episode has one sample."""
    names = sorted({one.name for part in task.parts for one in part.group_rewards})
    if names and samples < SMALLEST_GROUP:
        notice = f"group rewards are left out, which compare samples: {', '.join(names)}"
        Console().print(f"{notice}; add --samples 2 or more", markup=False, highlight=False)


def _stored(output: Path, indices: set[int]) -> list[Trace]:
    with RunReader(output) as reader:
        return [trace for trace in reader.all_traces() if trace.index in indices]
