"""Processes: they start by name, answer, survive Ctrl-C, and are gone when their owner closes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from echo_actors import Bad, EchoActor
from live_run import GONE_DEADLINE_S
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.config import configure, get_global_config

from composer_mesh.mesh.heartbeat import HeartbeatRules
from composer_mesh.mesh.processes import is_alive, wait_gone
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import (
    ActorDied,
    DeadlineExceeded,
    FaultPolicy,
    MeshError,
    ProcessLate,
    RemoteError,
    Supervisor,
)

Events = list[tuple[str, str, str]]


async def test_a_spawned_actor_describes_itself_and_is_gone_after_close(host: MeshHost) -> None:
    actor = await host.spawn("echo-0", EchoActor, "hello", env={"OMP_NUM_THREADS": "1"})
    about: dict[str, Any] = await actor.call("describe")
    assert (actor.name, actor.kind, actor.pid) == ("echo-0", "echo", about["pid"])
    assert about["pid"] != os.getpid()
    assert about["rss_bytes"] > 0
    assert about["cpu_seconds"] > 0
    assert await actor.call("say", "world") == "hello world"
    assert await actor.call("threads") == "1"
    await host.close()
    assert host.actors == []
    assert not is_alive(actor.pid)


async def test_a_killed_child_is_a_death_with_its_name(
    host: MeshHost, supervisor: Supervisor, events: Events
) -> None:
    one = await host.spawn("echo-0", EchoActor)
    two = await host.spawn("echo-1", EchoActor)
    os.kill(two.pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match=r"echo-1 died: .*(Killed\(sig=9\)|has ended)"):
        await supervisor.guard(one.call("hold"))
    with pytest.raises(ActorDied, match="echo-1"):
        await two.call("say", "still there?")
    await one.call("describe")  # a round trip later nothing more has been recorded
    assert [event[:2] for event in events] == [("actor_died", "echo-1")]


async def test_a_planned_stop_is_no_fault(host: MeshHost, supervisor: Supervisor) -> None:
    one = await host.spawn("echo-0", EchoActor)
    two = await host.spawn("echo-1", EchoActor)
    await host.stop(one)
    with pytest.raises(ActorDied, match="echo-0"):
        await one.call("say", "hello")
    assert await two.call("say", "hello") == "echo hello"
    assert not supervisor.failure.done()


async def test_a_planned_stop_is_told_to_whoever_waits_for_the_actors_end(host: MeshHost) -> None:
    spawned = await host.spawn("worker", EchoActor)
    assert spawned.alive
    await host.stop(spawned)
    assert not spawned.alive
    with pytest.raises(ActorDied, match="worker died: it was stopped"):
        await spawned.call("say", "hello")


async def test_ctrl_c_reaches_no_child(host: MeshHost) -> None:
    actor = await host.spawn("echo-0", EchoActor)
    os.kill(actor.pid, signal.SIGINT)
    assert await actor.call("say", "again") == "echo again"
    assert is_alive(actor.pid)


async def test_an_actor_that_cannot_start_says_why_and_leaves_no_process(host: MeshHost) -> None:
    with pytest.raises(ActorDied, match="echo-0 died: ValueError: this actor was told to fail"):
        await host.spawn("echo-0", EchoActor, fail=True)
    assert host.actors == []
    assert await (await host.spawn("echo-0", EchoActor)).call("say", "hi") == "echo hi"


async def test_two_actors_cannot_share_a_name(host: MeshHost) -> None:
    await host.spawn("echo-0", EchoActor)
    with pytest.raises(ValueError, match="'echo-0' already runs here: choose another name"):
        await host.spawn("echo-0", EchoActor)


async def test_the_errors_of_a_call_keep_their_type_or_their_text(host: MeshHost) -> None:
    actor = await host.spawn("echo-0", EchoActor)
    with pytest.raises(Bad) as bad:
        await actor.call("fail", "bad")
    assert bad.value.args == ("on", "purpose")
    assert isinstance(bad.value.__cause__, RemoteError)
    assert "echo_actors.py" in str(bad.value.__cause__)
    with pytest.raises(RemoteError, match=r"echo-0\.fail failed"):
        await actor.call("fail", "stubborn")
    with pytest.raises(DeadlineExceeded, match=r"echo-0\.hold gave no answer within 0\.1 s"):
        await actor.call("hold", deadline_s=0.1)
    assert await actor.call("say", "alive") == "echo alive"


async def test_work_that_stands_still_ends_with_its_last_progress_and_has_twice_the_time_again(
    host: MeshHost, events: Events
) -> None:
    """The work takes longer than its deadline before it stands still."""
    host.deadlines.most = 10
    actor = await host.spawn("echo-0", EchoActor)
    for bound in ("3", "6"):
        with pytest.raises(
            DeadlineExceeded,
            match=rf"echo-0\.work made no progress for {bound} s \(last progress: part 8 of 9, ",
        ):
            await actor.call("work", 8, 0.4, deadline_s=3.0)
    first, second = events
    assert first == (
        "deadline_doubled",
        "echo-0",
        "work: no progress within 3 s, so the next one has 6 s",
    )
    assert second[2] == "work: no progress within 6 s, so the next one has 12 s"


async def test_what_a_dead_actor_started_is_gone_when_it_is_stopped(host: MeshHost) -> None:
    actor = await host.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
    child = await actor.call("start_child")
    os.kill(actor.pid, signal.SIGKILL)
    assert actor.death is not None
    await actor.death
    assert is_alive(child)
    await host.stop(actor)
    assert await wait_gone(child, GONE_DEADLINE_S)


async def test_a_stopped_process_is_a_hang_and_then_a_death(host: MeshHost, events: Events) -> None:
    host.heartbeat = HeartbeatRules(every_s=0.1, hang_s=2.0)
    actor = await host.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
    held = asyncio.ensure_future(actor.call("hold"))
    await actor.call("describe")
    os.kill(actor.pid, signal.SIGSTOP)
    with pytest.raises(ActorDied, match="echo-0 died: it gave no answer within 2 s and was killed"):
        await held
    assert [event[:2] for event in events] == [("actor_hung", "echo-0"), ("actor_died", "echo-0")]
    assert await wait_gone(actor.pid, GONE_DEADLINE_S)
    again = await host.spawn("echo-0.2", EchoActor, policy=FaultPolicy.OWNER)
    os.kill(again.pid, signal.SIGSTOP)
    assert again.death is not None
    assert (await again.death).reason == "it gave no answer within 4 s and was killed"


async def test_an_actor_that_computes_for_longer_than_a_hang_is_left_alone(
    host: MeshHost, events: Events
) -> None:
    host.heartbeat = HeartbeatRules(every_s=0.1, hang_s=3.0)
    actor = await host.spawn("echo-0", EchoActor)
    await actor.call("spin", 7.0)
    assert (actor.alive, events) == (True, [])


async def test_a_host_that_closes_starts_nothing_more(host: MeshHost) -> None:
    await host.close()
    with pytest.raises(MeshError, match="echo-0 is not started: its host is closing"):
        await host.spawn("echo-0", EchoActor)


async def test_a_process_that_is_late_is_started_again(
    host: MeshHost, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_starts(host, monkeypatch, 1, "2s"):
        actor = await host.spawn("echo-0", EchoActor)
    assert await actor.call("say", "hello") == "echo hello"
    assert events == [("start_repeated", "echo-0", "its process was not ready within 2s")]
    assert len(await host.here.started_processes("echo-0")) == 1


async def test_one_that_is_always_late_is_an_error_that_says_what_to_do_and_leaves_nothing(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MeshHost(supervisor, start_deadline_s=8.0) as host:
        with late_starts(host, monkeypatch, 100, "1s"), pytest.raises(ProcessLate) as late:
            await host.spawn("echo-0", EchoActor)
        assert (host.actors, await host.here.started_processes("echo-0")) == ([], [])
    assert late.value.starts >= 2
    assert str(late.value) == (
        f"echo-0 was started {late.value.starts} times on localhost, but its process was never "
        "ready within 1s: start fewer processes at once there, or install the Python environment "
        "on a faster disk"
    )


@contextlib.contextmanager
def late_starts(
    host: MeshHost, monkeypatch: pytest.MonkeyPatch, count: int, limit: str
) -> Iterator[None]:
    """Let the next processes of a host take a minute to begin, with this limit of Monarch's."""
    command = host.here.command
    normal = str(get_global_config()["mesh_proc_spawn_max_idle"])
    left = iter(range(count))

    async def late(*given: Any) -> BootstrapCommand:
        usual = await command(*given)
        if next(left, None) is None:
            configure(mesh_proc_spawn_max_idle=normal)
            return usual
        configure(mesh_proc_spawn_max_idle=limit)
        code = "import os, sys, time; time.sleep(60); os.execv(sys.argv[1], sys.argv[1:])"
        arguments = ["-c", code, usual.program, *usual.args]
        return BootstrapCommand(usual.program, None, arguments, usual.env)

    with monkeypatch.context() as patch:
        patch.setattr(host.here, "command", late)
        try:
            yield
        finally:
            configure(mesh_proc_spawn_max_idle=normal)
