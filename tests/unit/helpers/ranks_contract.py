"""What every implementation of the port `CheckpointedRanks` does: the fakes and the real processes.

Each claim is a coroutine function that takes a harness. Each holds for ranks that were just loaded,
and in the order of `CLAIMS` one harness can go through all of them with few restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.training.checkpoint_writes import CheckpointedRanks

LONG_ENOUGH_S = 0.05
"""What something that should wait, and does not, is given to show it."""


class RanksHarness(Protocol):
    """Ranks at `version`, and what can be done to them from outside."""

    ranks: CheckpointedRanks
    version: int

    def kill_one(self) -> None:
        """End one rank's process, or what stands for it."""
        ...

    def fail_next_start(self, error: Exception) -> None:
        """Let the next `restart_from` fail with an error while it starts the processes."""
        ...


Claim = Callable[[RanksHarness, Path], Awaitable[None]]


async def waits(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait([task], timeout=LONG_ENOUGH_S)
    return not task.done()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def kill_one(harness: RanksHarness) -> ActorDied:
    """End a rank, unless one has ended, and wait until it is known."""
    if harness.ranks.died() is None:
        harness.kill_one()
    await harness.ranks.until_one_dies()
    died = harness.ranks.died()
    assert died is not None
    return died


async def ranks_that_live_have_no_death(harness: RanksHarness, _: Path) -> None:
    assert harness.ranks.died() is None
    waiting = asyncio.create_task(harness.ranks.until_one_dies())
    assert await waits(waiting)
    await cancelled(waiting)


async def work_ends_as_it_ends_while_all_ranks_live(harness: RanksHarness, _: Path) -> None:
    async def work(error: Exception | None) -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return "done"

    assert await harness.ranks.guard(work(None)) == "done"
    with pytest.raises(LookupError, match="no group"):
        await harness.ranks.guard(work(LookupError("no group")))


async def an_error_without_a_death_is_its_own_cause(harness: RanksHarness, _: Path) -> None:
    error = RuntimeError("Connection reset by peer")
    assert await harness.ranks.cause_of(error) is error
    other = ActorDied("generator-0", "killed")
    assert await harness.ranks.cause_of(other) is other
    assert harness.ranks.died() is None


async def work_under_way_ends_with_a_death(harness: RanksHarness, _: Path) -> None:
    stopped = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    guarded = asyncio.create_task(harness.ranks.guard(work()))
    assert await waits(guarded)
    names = harness.ranks.names()
    harness.kill_one()
    with pytest.raises(ActorDied) as told:
        await guarded
    assert told.value.actor in names
    assert stopped.is_set()


async def no_work_begins_where_a_rank_is_dead(harness: RanksHarness, _: Path) -> None:
    began = False

    async def work() -> None:
        nonlocal began
        began = True

    died = await kill_one(harness)
    with pytest.raises(ActorDied) as told:
        await harness.ranks.guard(work())
    assert told.value.actor == died.actor
    assert not began


async def a_death_explains_an_error_of_others(harness: RanksHarness, _: Path) -> None:
    died = await kill_one(harness)
    for error in (RuntimeError("Connection reset by peer"), ActorDied("generator-0", "killed")):
        cause = await harness.ranks.cause_of(error)
        assert isinstance(cause, ActorDied)
        assert cause.actor == died.actor


async def a_death_that_only_a_caller_heard_of_is_known_afterwards(
    harness: RanksHarness, _: Path
) -> None:
    name = harness.ranks.names()[0]
    cause = await harness.ranks.cause_of(ActorDied(name, "gone"))
    assert isinstance(cause, ActorDied)
    await harness.ranks.until_one_dies()
    died = harness.ranks.died()
    assert died is not None
    assert died.actor == name


async def a_restart_brings_other_ranks_that_live(harness: RanksHarness, _: Path) -> None:
    before = harness.ranks.names()
    await kill_one(harness)
    assert await harness.ranks.restart_from(None) == 0
    assert not set(before) & set(harness.ranks.names())
    await ranks_that_live_have_no_death(harness, _)
    await work_ends_as_it_ends_while_all_ranks_live(harness, _)


async def ranks_that_begin_at_a_checkpoint_have_its_version(
    harness: RanksHarness, folder: Path
) -> None:
    draft, version = folder / "draft", harness.version
    draft.mkdir()
    await harness.ranks.save(draft, False)
    files = await harness.ranks.saved()
    assert files
    assert all((draft / one.path).stat().st_size == one.bytes for one in files)
    await kill_one(harness)
    assert await harness.ranks.restart_from(draft) == version


async def a_restart_that_cannot_start_fails_with_its_cause_and_leaves_no_rank(
    harness: RanksHarness, _: Path
) -> None:
    """No death is left either: it would hide the cause from who asks for it next."""
    await kill_one(harness)
    full = OSError(28, "No space left on device")
    harness.fail_next_start(full)
    with pytest.raises(OSError, match="No space left on device"):
        await harness.ranks.restart_from(None)
    assert harness.ranks.died() is None
    assert await harness.ranks.cause_of(full) is full
    waiting = asyncio.create_task(harness.ranks.until_one_dies())
    assert await waits(waiting)
    assert await harness.ranks.restart_from(None) == 0
    assert await waits(waiting)
    harness.kill_one()
    await waiting


async def a_restart_in_which_a_rank_dies_fails_with_its_death(
    harness: RanksHarness, _: Path
) -> None:
    await kill_one(harness)
    dead = ActorDied("trainer", "no memory")
    harness.fail_next_start(dead)
    with pytest.raises(ActorDied, match="no memory"):
        await harness.ranks.restart_from(None)
    assert harness.ranks.died() is None
    assert await harness.ranks.cause_of(dead) is dead


CLAIMS: tuple[Claim, ...] = (
    ranks_that_live_have_no_death,
    work_ends_as_it_ends_while_all_ranks_live,
    an_error_without_a_death_is_its_own_cause,
    ranks_that_begin_at_a_checkpoint_have_its_version,
    work_under_way_ends_with_a_death,
    no_work_begins_where_a_rank_is_dead,
    a_death_explains_an_error_of_others,
    a_death_that_only_a_caller_heard_of_is_known_afterwards,
    a_restart_brings_other_ranks_that_live,
    a_restart_that_cannot_start_fails_with_its_cause_and_leaves_no_rank,
    a_restart_in_which_a_rank_dies_fails_with_its_death,
)
