"""The mesh seen from outside: Monarch's admin server, read and drawn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from echo_actors import EchoActor
from live_run import RUN_DEADLINE_S, wait_until

from composer_mesh.mesh.admin import AdminUnreachable, MeshTree, read_mesh, start_admin
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.services.directory.status import ActorStatus, RunStatus, write_status
from composer_mesh.services.inspection.tree import tree_command


def actor_names(mesh: MeshTree) -> set[str]:
    return {actor.name for host in mesh.hosts for proc in host.procs for actor in proc.actors}


async def shown(look: Callable[[], bool], what: str) -> None:
    """Look until the mesh shows something: it leaves out a process that is too busy to answer."""

    def seen() -> bool:
        with suppress(AdminUnreachable):
            return look()
        return False

    await asyncio.to_thread(wait_until, seen, what, RUN_DEADLINE_S)


def run_status(url: str, host: MeshHost) -> RunStatus:
    actors = tuple(ActorStatus(a.name, a.kind, a.pid) for a in host.actors)
    return RunStatus(os.getpid(), url, "training", 1, 2, 1, "tcp", actors)


async def test_the_tree_shows_living_and_dead_actors(
    host: MeshHost,
    supervisor: Supervisor,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    echo = await host.spawn("echo-0", EchoActor)
    doomed = await host.spawn("echo-1.2", EchoActor)
    url = await start_admin(host)
    assert capfd.readouterr() == ("", "")
    await shown(lambda: {"echo-0", "echo-1_2"} <= actor_names(read_mesh(url)), "two actors")

    write_status(tmp_path, run_status(url, host))
    os.kill(doomed.pid, signal.SIGKILL)
    await supervisor.failure
    expected = {
        "echo-0": (echo.pid, "echo", "ready"),
        "echo-1.2": (doomed.pid, "echo", "dead"),
    }

    def seen() -> bool:
        assert tree_command(tmp_path, as_json=True) == 0
        about = json.loads(capfd.readouterr().out)
        return expected == {
            actor["name"]: (process["pid"], actor["kind"], actor["state"])
            for host in about["hosts"]
            for process in host["processes"]
            for actor in process["actors"]
        }

    def named() -> bool:
        assert tree_command(tmp_path) == 0
        return "  echo-1.2   dead " in capfd.readouterr().out

    await shown(seen, "a living and a dead actor")
    await shown(named, "a dead actor in words")


def test_an_address_where_nobody_answers_is_a_clear_error() -> None:
    with pytest.raises(AdminUnreachable, match="has the run ended"):
        read_mesh("http://127.0.0.1:9")
