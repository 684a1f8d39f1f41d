"""Environments: each attempt's session lives in one process, and what is lost is let go of."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from composer_mesh.services.episodes.environments import MeshEnvironments
from fake_host import FakeActor, FakeHost, turns

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import SessionLost
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services import service
from composer_mesh.services.pool.errors import NoReplicaLeft
from composer_mesh.services.service import Service

EPISODE = Episode("toolbox", "train", 0, {})


async def environments(host: FakeHost, n: int = 2) -> tuple[MeshEnvironments, Service]:
    pool = await service.spawn(
        EnvironmentActor, n=n, host=cast(MeshHost, host), name="e", attempts=2
    )
    return MeshEnvironments(pool, lambda *_, **__: None), pool


def heard(actor: FakeActor) -> list[tuple[Any, ...]]:
    return [(endpoint, args[0]) for endpoint, *args in actor.heard if args]


async def test_all_calls_of_a_session_go_to_the_process_that_has_it() -> None:
    host = FakeHost()
    port, _ = await environments(host)
    for session in ("a", "b"):
        await port.begin(session, EPISODE)
    for session in ("b", "a", "b"):
        await port.step(session, "text")
        await port.step(session, "text")
    await port.finish("a")
    calls = ["begin", "step", "step", "finish"]
    assert heard(host["e-0"]) == [(call, "a") for call in calls]
    assert heard(host["e-1"]) == [("begin", "b"), *[("step", "b")] * 4]


async def test_new_sessions_go_where_the_fewest_are() -> None:
    host = FakeHost()
    port, pool = await environments(host)
    for session in "abcd":
        await port.begin(session, EPISODE)
    assert [line["sessions"] for line in pool.status()] == [2, 2]
    await port.finish("a")
    port.abandon("c")
    await port.begin("e", EPISODE)
    assert [line["sessions"] for line in pool.status()] == [1, 2]


async def test_a_session_is_lost_with_its_process_and_another_begins_elsewhere() -> None:
    host = FakeHost()
    port, pool = await environments(host)
    await port.begin("a", EPISODE)
    host["e-0"].die()
    await turns()
    with pytest.raises(SessionLost, match="'a' was lost with e-0: killed"):
        await port.step("a", "text")
    port.abandon("a")
    await port.begin("a.2", EPISODE)
    await turns()
    assert heard(host["e-1"]) == [("begin", "a.2")]
    assert heard(host["e-0"]) == [("begin", "a")]
    assert [line["sessions"] for line in pool.status()] == [0, 1]


async def test_a_living_process_is_told_to_forget_what_was_abandoned() -> None:
    host = FakeHost()
    port, _ = await environments(host)
    await port.begin("a", EPISODE)
    port.abandon("a")
    port.abandon("a")
    await turns()
    assert heard(host["e-0"]) == [("begin", "a"), ("forget", "a")]
    assert heard(host["e-1"]) == []
    await port.begin("a", EPISODE)  # its name is free again


async def test_a_session_whose_beginning_failed_can_be_abandoned() -> None:
    host = FakeHost()
    port, pool = await environments(host, n=1)
    host["e-0"].broken = ValueError("no such episode")
    with pytest.raises(ValueError, match="no such episode"):
        await port.begin("a", EPISODE)
    port.abandon("a")
    assert [line["sessions"] for line in pool.status()] == [0]


async def test_a_beginning_waits_for_the_process_that_is_being_made_ready() -> None:
    host = FakeHost()
    port, pool = await environments(host, n=1)
    host["e-0"].die()
    await turns()
    host.gate = asyncio.Event()
    resizing = asyncio.create_task(pool.resize(1))
    await turns()
    beginning = asyncio.create_task(port.begin("a", EPISODE))
    await turns()
    assert not beginning.done()
    host.gate.set()
    await asyncio.gather(resizing, beginning)
    assert heard(host["e-0.2"]) == [("begin", "a")]


async def test_without_any_process_left_there_is_one_clear_error() -> None:
    host = FakeHost()
    port, _ = await environments(host, n=1)
    host["e-0"].die("out of memory")
    await turns()
    with pytest.raises(NoReplicaLeft, match="e-0 died: out of memory"):
        await port.begin("a", EPISODE)
    port.abandon("a")
