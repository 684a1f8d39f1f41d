"""Forked processes: like started ones in all that an actor or its owner sees, and as mortal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from echo_actors import EchoActor

from composer_mesh.mesh import programs
from composer_mesh.mesh.fork_server.owner import ForkServerFailed
from composer_mesh.mesh.fork_server.protocol import FOLDER
from composer_mesh.mesh.hosts.process_lifetime import PARENT_LOOK_S
from composer_mesh.mesh.processes import children_of, is_alive, wait_gone
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, Supervisor

Events = list[tuple[str, str, str]]
LIGHT = ("json",)
"""What the servers of these tests import: nothing that takes time."""
WAIT_S = 60.0


@pytest.fixture
async def forking(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MeshHost]:
    """An owner of processes with a fork server of its own."""
    monkeypatch.delenv(FOLDER)
    async with MeshHost(supervisor, stop_deadline_s=5.0, preload=LIGHT) as host:
        yield host
    assert _servers() == []


def _servers() -> list[int]:
    return children_of(os.getpid(), ["composer_mesh.mesh.fork_server.server", *LIGHT])


async def test_a_forked_process_has_its_own_name_environment_folder_and_group(
    forking: MeshHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await forking.spawn("echo-0", EchoActor, env={"OMP_NUM_THREADS": "1"})
    monkeypatch.chdir(tmp_path)
    two = await forking.spawn("echo-1", EchoActor, env={"OMP_NUM_THREADS": "1", "X": "y"})
    (server,) = _servers()
    forked = [psutil.Process(actor.pid) for actor in (one, two)]
    assert [process.ppid() for process in forked] == [server, server]
    assert [os.getpgid(process.pid) for process in forked] == [one.pid, two.pid]
    assert [process.cmdline()[0].split()[:2] for process in forked] == [
        ["composer-mesh", "echo-0"],
        ["composer-mesh", "echo-1"],
    ]
    assert await two.call("variable", "X") == "y"
    assert await one.call("variable", "X") is None
    assert Path(forked[1].cwd()) == tmp_path
    assert Path(forked[0].cwd()) != tmp_path


async def test_other_import_time_variables_get_another_server(forking: MeshHost) -> None:
    one = await forking.spawn("echo-0", EchoActor, env={"OMP_NUM_THREADS": "1"})
    two = await forking.spawn("echo-1", EchoActor, env={"OMP_NUM_THREADS": "2"})
    assert [await actor.call("threads") for actor in (one, two)] == ["1", "2"]
    parents = [psutil.Process(actor.pid).ppid() for actor in (one, two)]
    assert sorted(parents) == sorted(_servers())
    assert len(set(parents)) == 2


async def test_the_death_of_a_fork_is_told_with_its_signal(
    forking: MeshHost, events: Events
) -> None:
    actor = await forking.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
    assert actor.death is not None
    os.kill(actor.pid, signal.SIGKILL)
    assert "Killed(sig=9)" in str(await asyncio.wait_for(actor.death, WAIT_S))
    assert events[0][:2] == ("actor_died", "echo-0")


async def test_a_fork_ends_with_the_process_that_monarch_started_for_it(forking: MeshHost) -> None:
    actor = await forking.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
    (started,) = children_of(os.getpid(), ["composer_mesh.mesh.bootstrap", "echo-0"])
    os.kill(started, signal.SIGKILL)
    assert await wait_gone(actor.pid, WAIT_S)


async def test_forks_end_with_their_server_and_the_next_process_gets_another(
    forking: MeshHost,
) -> None:
    actor = await forking.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
    assert actor.death is not None
    (server,) = _servers()
    os.kill(server, signal.SIGKILL)
    assert isinstance(await asyncio.wait_for(actor.death, WAIT_S), ActorDied)
    assert await wait_gone(actor.pid, WAIT_S)
    successor = await forking.spawn("echo-0.2", EchoActor)
    assert await successor.call("say", "hi") == "echo hi"
    assert psutil.Process(successor.pid).ppid() not in (server, os.getpid())


async def test_a_fork_that_could_not_use_a_gpu_starts_anew_and_ends_like_others(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER)
    async with MeshHost(supervisor, preload=["cuda_before_fork"]) as host:
        actor = await host.spawn("echo-0", EchoActor, policy=FaultPolicy.OWNER)
        assert psutil.Process(actor.pid).cmdline()[:3:2] == [sys.executable, "-m"]
        assert "CUDA was initialized before the fork" in capfd.readouterr().err
        await asyncio.sleep(2 * PARENT_LOOK_S)  # it looks for its parent as often
        assert await actor.call("say", "hi") == "echo hi"
        (started,) = children_of(os.getpid(), ["composer_mesh.mesh.bootstrap", "echo-0"])
        os.kill(started, signal.SIGKILL)
        assert await wait_gone(actor.pid, WAIT_S)


async def test_a_server_that_cannot_import_is_an_error_that_says_so(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FOLDER)
    async with MeshHost(supervisor, preload=["monarch.actor"]) as host:
        with pytest.raises(ForkServerFailed, match=r"placement\.fork_server to false"):
            await host.spawn("echo-0", EchoActor)
    assert "import Monarch" in capfd.readouterr().err


async def test_a_killed_owner_leaves_neither_server_nor_forks(tmp_path: Path) -> None:
    told = tmp_path / "pids"
    owner = programs.start_tied(
        [sys.executable, "-c", OWNER, str(told)],
        {name: value for name, value in os.environ.items() if name != FOLDER},
    )
    while not told.exists():
        assert is_alive(owner)
        await asyncio.sleep(0.05)
    pids = [int(pid) for pid in told.read_text().split()]
    assert len(pids) == 2
    os.kill(owner, signal.SIGKILL)
    programs.reap(owner)
    assert all([await wait_gone(pid, WAIT_S) for pid in pids])


OWNER = """
import asyncio, os, sys
from pathlib import Path
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from echo_actors import EchoActor

async def main():
    async with MeshHost(Supervisor(), preload=["json"]) as host:
        actor = await host.spawn("echo-0", EchoActor)
        server = int(await actor.call("parent"))
        draft = Path(sys.argv[1] + ".draft")
        draft.write_text(f"{actor.pid} {server}")
        draft.rename(sys.argv[1])
        await asyncio.sleep(600)

asyncio.run(main())
"""
