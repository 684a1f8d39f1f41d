"""Where the pairs of the replay channel come from: a file of them, or teachers during training.

`StoredPairs` cycles through rows that were made before, such as those of `composer-mesh replay`.
`TeacherPairs` asks external teachers about states of each batch's rollouts, by the rules of a run:
worthwhile states, votes, filters, and a ledger on the disk that no request may pass.
"""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from composer_mesh.actors.panel.configured import CACHE_FILE
from composer_mesh.channels.replay import pair_samples
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import LoopThread
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import message_text
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.offline.api import Teacher, in_memory_config
from composer_mesh.services.offline.job import OfflineJob
from composer_mesh.services.offline.options import CONCURRENCY
from composer_mesh.services.offline.session import TeacherClient, opened_panel
from composer_mesh.tasks.rows import json_lines
from composer_mesh.tasks.task import Task

Figures = dict[str, float]


class NoPairs(ValueError):
    """No row is a pair that can be trained."""


@dataclass(frozen=True)
class PairSettings:
    """What a trainer says to its source of pairs.

    `groups` are the prompts of a generation batch over all ranks, `folder` is where files may lie.
    """

    chat: ChatFormat
    max_context: int
    groups: int
    seed: int
    folder: Path


class PairSource(Protocol):
    """A source of pairs. One that `reads_rollouts` is used on the main process alone."""

    @property
    def reads_rollouts(self) -> bool: ...

    def open(self, settings: PairSettings) -> None:
        """Begin; called once, before the first step."""

    def pairs(
        self, step: int, share: float, traces: Sequence[Trace], /
    ) -> tuple[list[PairSample], Figures]:
        """Return the pairs of a generation batch, and figures of it.

        `step` is the optimizer step (0-based) and `share` the steps that the batch is trained in;
        `traces` are the batch's rollouts of all ranks.
        """

    def close(self) -> None:
        """End, after the last step."""


class StoredPairs:
    """Rows with `prompt`, `chosen` and `rejected`, as TRL's DPOTrainer takes them.

    `rows` is a file of JSON lines, such as `composer-mesh replay` writes, or an iterable of rows,
    such as a data set. `per_step` of them are trained in each optimizer step, in a new order
    each time they have all been seen.
    """

    reads_rollouts = False

    def __init__(self, rows: Path | str | Iterable[Mapping[str, Any]], per_step: int = 16) -> None:
        if per_step < 1:
            raise ValueError(f"per_step is {per_step} but must be >= 1: use 16")
        self._rows, self._per_step = rows, per_step
        self.pairs_left_out = 0

    def open(self, settings: PairSettings) -> None:
        rows = _listed(self._rows)
        found = [_sample(place, row, settings.chat) for place, row in enumerate(rows)]
        self._samples = [one for one in found if _length(one) <= settings.max_context]
        self.pairs_left_out = len(found) - len(self._samples)
        if not self._samples:
            raise NoPairs(
                f"none of {len(found)} pairs fits into {settings.max_context} tokens: raise "
                "max_context, or give rows with prompt, chosen and rejected"
            )
        self._seed = settings.seed
        self._order: tuple[int, list[int]] = (-1, [])

    def pairs(
        self, step: int, share: float, _traces: Sequence[Trace], /
    ) -> tuple[list[PairSample], Figures]:
        first, count = step * self._per_step, max(1, round(share * self._per_step))
        return [self._at(place) for place in range(first, first + count)], {}

    def _at(self, place: int) -> PairSample:
        epoch, index = divmod(place, len(self._samples))
        if self._order[0] != epoch:
            order = list(range(len(self._samples)))
            random.Random(f"{self._seed}:pairs:{epoch}").shuffle(order)
            self._order = epoch, order
        return self._samples[self._order[1][index]]

    def close(self) -> None:
        """Do nothing."""


class TeacherPairs:
    """Asks teachers during training, within `max_total_usd` over the whole run, resumes included.

    `teachers` are OpenRouter ids, tables as in [[replay.teachers]], or those of kind "builtin"
    where `task` has an expert; `overrides` are settings of [replay], as "replay.ask=2". `folder`
    keeps the ledger and the paid answers; by default it is `teacher_replay` in the output folder.
    """

    reads_rollouts = True

    def __init__(
        self,
        teachers: Sequence[Teacher],
        max_total_usd: float = 0.0,
        *,
        task: Task | None = None,
        overrides: Sequence[str] = (),
        folder: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config: Config = in_memory_config(teachers, overrides, max_total_usd)
        self._task, self._folder = task, folder
        self._environ, self._transport = environ, transport
        self._loop: LoopThread | None = None
        self._groups = 0

    def open(self, settings: PairSettings) -> None:
        self._settings = settings
        schedule = self._config.schedule.model_copy(update={"prompts_per_step": settings.groups})
        self._config = self._config.model_copy(update={"schedule": schedule})
        self._loop = LoopThread("teacher-pairs")
        try:
            folder = self._folder or settings.folder
            folder.mkdir(parents=True, exist_ok=True)
            self._loop.run_blocking(self._open(folder))
        except BaseException:
            self.close()
            raise

    async def _open(self, folder: Path) -> None:
        async with AsyncExitStack() as stack:
            panel = await stack.enter_async_context(
                opened_panel(
                    self._config,
                    self._task,
                    folder,
                    tools=self._settings.chat.tools,
                    answers=folder / CACHE_FILE,
                    environ=self._environ,
                    transport=self._transport,
                )
            )
            client = TeacherClient(panel, CONCURRENCY)
            self._job = OfflineJob(self._config, client, CONCURRENCY)
            self._stack = stack.pop_all()

    def pairs(
        self, _step: int, _share: float, traces: Sequence[Trace], /
    ) -> tuple[list[PairSample], Figures]:
        if self._loop is None:
            raise RuntimeError("the teachers are not open: call open first")
        groups = grouped(traces, self._groups)
        self._groups += len(groups)
        before, spent = len(self._job.pairs), self._job.figures.usd
        self._loop.run_blocking(self._job.run(groups))
        made = self._job.pairs[before:]
        del self._job.pairs[:]
        figures = {"replay/usd": self._job.figures.usd - spent}
        return pair_samples(made, self._settings.chat, self._settings.max_context), figures

    def close(self) -> None:
        """Close the connections to the teachers."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        stack: AsyncExitStack | None = getattr(self, "_stack", None)
        if stack is not None:
            loop.run_blocking(stack.aclose())
        loop.close()


def preference_dataset(rows: Path | str | Iterable[Mapping[str, Any]]) -> Any:
    """Return pairs as a `datasets.Dataset` for TRL's DPOTrainer: prompt, chosen, rejected, tools.

    `rows` is a file of `composer-mesh replay`, or what `replay_and_normalize_trace` returns.
    """
    from datasets import Dataset

    listed = _listed(rows)
    kept = ("prompt", "chosen", "rejected", "tools")
    return Dataset.from_list([{key: row[key] for key in kept if key in row} for row in listed])


def grouped(traces: Sequence[Trace], first: int) -> list[list[Trace]]:
    """Return rollouts by their first prompt, as groups that are numbered from `first` on.

    Rollouts of one prompt that were played on several ranks are one group.
    """
    groups: dict[tuple[int, ...], list[Trace]] = {}
    for trace in traces:
        groups.setdefault(tuple(trace.prompt_ids(0)), []).append(trace)
    return [
        [
            replace(trace, group_id=number, trace_id=f"{trace.split}-{number:06d}-{sample:03d}")
            for sample, trace in enumerate(group)
        ]
        for number, group in enumerate(groups.values(), first)
    ]


def _listed(rows: Any) -> list[dict[str, Any]]:
    """Return rows, or those of a file of JSON lines."""
    return list(json_lines(Path(rows)) if isinstance(rows, str | Path) else rows)


def _sample(place: int, row: Mapping[str, Any], chat: ChatFormat) -> PairSample:
    missing = [name for name in ("prompt", "chosen", "rejected") if not row.get(name)]
    if missing:
        raise NoPairs(
            f"row {place} has no {', '.join(missing)}: give the messages before the answer, and "
            "both answers as lists of one message"
        )
    chosen, rejected = (_answer(row[side]) for side in ("chosen", "rejected"))
    return PairSample(
        str(row.get("state_id", place)),
        chat.first_prompt([dict(message) for message in row["prompt"]]),
        chat.action(chosen),
        chat.action(rejected),
    )


def _answer(messages: Sequence[Mapping[str, Any]]) -> str:
    return message_text(dict(messages[-1]))


def _length(pair: PairSample) -> int:
    return len(pair.context_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
