"""Runs an evaluation, by the actors of a run or against an endpoint, and reports what is stored.

Episodes that are stored already are not played again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderError
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.tasks import SMALLEST_GROUP
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.checks.local_judges import local_judges
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.evaluation.in_process import (
    EndpointEvaluation,
    InProcessEvaluation,
    Script,
    ScriptedEvaluation,
)
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
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.errors import JudgesSpent
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopBlocked

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


def evaluate_endpoint(
    config: Config,
    task: Task,
    output: Path,
    left: Sequence[int],
    samples: int,
    endpoint: TeacherEndpoint,
    timeout_s: float,
    signals: CommandSignals,
    *,
    max_usd: float | None = None,
    environ: Mapping[str, str] = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> int:
    """Play episodes against an endpoint; the exit status is 1 where it answered none of them.

    With `max_usd` no request is sent that might cost more in all, over all commands that continued
    in this directory; the endpoint needs prices. `transport` replaces the network.
    """
    signals.hold()

    async def play() -> int:
        timeouts = Timeouts(timeout_s, line_s=float("inf"))
        async with (
            _meter(output, endpoint, max_usd) as meter,
            ProviderClient(timeouts, environ=environ, transport=transport) as client,
        ):
            evaluation = EndpointEvaluation(config, task, store, client, endpoint, samples, meter)
            return await _played(evaluation, left, samples)

    with _judged(config, task, output, transport) as store:
        return asyncio.run(until_interrupted(play(), signals))


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


def evaluate_script(
    config: Config,
    task: Task,
    output: Path,
    left: Sequence[int],
    script: Script,
    signals: CommandSignals,
) -> int:
    """Play episodes by a scripted policy; the exit status is 1 where none could be played."""
    signals.hold()

    with _judged(config, task, output) as store:
        playing = _played(ScriptedEvaluation(config, task, store, script), left, 1)
        return asyncio.run(until_interrupted(playing, signals))


@contextmanager
def _judged(
    config: Config, task: Task, output: Path, transport: httpx.AsyncBaseTransport | None = None
) -> Iterator[RunStore]:
    """Open the store of an evaluation, with judges for the task where the config has any."""
    try:
        with RunStore(output, config) as store, local_judges(config, output, transport) as judges:
            if judges is not None:
                task.use_judges(judges)
            yield store
    except ProviderError as error:
        raise EvalRefused(error.for_role("judge", "judges")) from None


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
                f"--json {json_file} cannot be written ({error.strerror}): name another file"
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
