"""Job of an offline replay: groups in order, their states to the teachers, pairs out in order.

The rules are those of a training run: `Replay` selects and votes, `PairFilters` drop. This module
only keeps enough groups in flight, in group order, so that the same traces and answers make the
same pairs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import FrozenState, PreferencePair, TeacherReply
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.offline.figures import ReplayFigures, ReplayPlan, plan_replay
from composer_mesh.services.offline.session import Stopped, TeacherClient
from composer_mesh.services.offline.traces import TraceFileError
from composer_mesh.services.replay.teacher_queries import Replay, replay_of
from composer_mesh.services.steps.step_manifest import ReplayOutcome

AHEAD = 2
"""States of groups in flight, as a multiple of the query concurrency."""


class _Remembering:
    """`Teachers` port over the teacher client that stores replies until they are taken."""

    def __init__(self, teacher_client: TeacherClient) -> None:
        self._teacher_client = teacher_client
        self._replies: dict[str, list[TeacherReply]] = {}

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        replies = await self._teacher_client.query(state, n)
        self._replies[state.state_id] = replies
        return replies

    def take(self, state_id: str) -> list[TeacherReply] | None:
        """Return the replies about a state; None if it was not queried."""
        return self._replies.pop(state_id, None)


def _nothing(_: ReplayFigures) -> None:
    return None


@dataclass
class OfflineJob:
    """One pass over some groups. `tell` is called after each finished group."""

    config: Config
    teacher_client: TeacherClient
    concurrency: int
    tell: Callable[[ReplayFigures], None] = _nothing
    pairs: list[PreferencePair] = field(default_factory=list)
    figures: ReplayFigures = field(init=False)

    def __post_init__(self) -> None:
        self._answers = _Remembering(self.teacher_client)
        self._replay = replay_of(self.config, self._answers)
        self._filters = PairFilters(self.config.replay.filters)
        self.figures = ReplayFigures(self.config.replay.agreement_threshold)

    async def run(self, groups: Iterable[Sequence[Trace]], limit: int | None = None) -> bool:
        """Query all groups, or the first `limit` states; return whether the pass was completed.

        Once the client is stopped, waits for queries in flight and returns with the completed
        groups. On cancellation, queries in flight are dropped.
        """
        window: deque[tuple[Selection, asyncio.Task[ReplayOutcome]]] = deque()
        try:
            for selection in selections(self._replay, groups, limit):
                window.append((selection, asyncio.create_task(self._replay.ask_about(selection))))
                while sum(chosen.most for chosen, _ in window) > AHEAD * self.concurrency:
                    await self._finish(*window.popleft())
            while window:
                await self._finish(*window.popleft())
        except Stopped:
            await self.teacher_client.idle()
            return False
        finally:
            await _cancelled([task for _, task in window])
        return True

    async def _finish(self, selection: Selection, asking: "asyncio.Task[ReplayOutcome]") -> None:
        replayed = await asking
        filtered = await asyncio.to_thread(self._filters.keep, replayed.pairs)
        for states in selection.questions:
            if (replies := self._answers.take(states[0].state.state_id)) is not None:
                self.figures.add(states, replies)
        self.figures.add_group(selection.skipped, filtered.dropped, len(filtered.kept))
        self.pairs += filtered.kept
        self.tell(self.figures)


def plan_job(
    config: Config,
    groups: Iterable[Sequence[Trace]],
    teachers: Sequence[TeacherEndpoint],
    tools: Sequence[Mapping[str, Any]],
    limit: int | None = None,
) -> ReplayPlan:
    """Plan the queries of a job and their price; reads all groups and sends no query."""
    chosen = selections(replay_of(config, _Nobody()), groups, limit)
    return plan_replay(chosen, teachers, tools, config.replay)


class _Nobody:
    """A `Teachers` port for state selection only; any query raises."""

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        raise RuntimeError(f"{n} teachers were queried about {state.state_id}: only choose states")


def selections(
    replay: Replay, groups: Iterable[Sequence[Trace]], limit: int | None = None
) -> Iterator[Selection]:
    """Yield the selected states group by group; raise `TraceFileError` for inconsistent traces."""
    left = limit
    for group in groups:
        if left is not None and left <= 0:
            return
        try:
            chosen = replay.choose(group)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TraceFileError(
                f"group {group[0].group_id} cannot be replayed ({error}): repair its traces or "
                "remove them"
            ) from error
        if left is not None:
            chosen = chosen.cut(left)
            left -= chosen.most
        yield chosen


async def _cancelled(tasks: Sequence["asyncio.Task[ReplayOutcome]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
