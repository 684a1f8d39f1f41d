"""A shared run on two hosts: one is lost, another joins, and at last the controller is killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from commands import current_environment
from live_run import ENDLESS, GONE_DEADLINE_S, LiveRun, can_read_stacks, composer_mesh, launched
from run_workers import Worker, worker
from shared_runs import own_temporary_folder, steps
from side_by_side import SideBySide

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.mesh.hosts.certificates import make_authority
from composer_mesh.mesh.private_folder import remove_abandoned

LEASE_S = 8.0


@dataclass
class TwoHosts:
    """What was seen of the run, in the order of time."""

    run: LiveRun
    actors: dict[str, str]
    """The host of each actor, when there are some on all hosts."""
    families: list[set[int]]
    """The processes of each host."""
    knowing: list[int]
    """Those of them that have the experts' token in their environment."""
    stacks: CompletedProcess[str] | None
    """None where stacks cannot be read here."""
    joined: CompletedProcess[str]
    scaled: CompletedProcess[str]
    last_families: list[set[int]]
    """The processes of the hosts that were left, before the controller was killed."""
    said: list[str]
    """The output of these hosts, after their last process."""
    left: list[Path]
    """Temporary files that an end of the run has not removed, and the next start does not."""


def on_hosts(workers: list[Worker], authority: Path) -> dict[str, object]:
    """The settings of a run on these workers."""
    return {
        "cluster.kind": "hosts",
        "cluster.workers": json.dumps([one.address for one in workers]),
        "cluster.authority": authority,
        "cluster.lease_s": LEASE_S,
    }


def until_steps_more(run: LiveRun, number: int = 2) -> None:
    begin = steps(run)
    run.until(lambda run: steps(run) >= begin + number, f"{number} steps more")


def hosts_of_actors(run: LiveRun) -> dict[str, str]:
    status = json.loads((run.root / "status.json").read_text())
    return {actor["name"]: actor["host"] for actor in status["actors"]}


def remote(run: LiveRun) -> list[dict[str, Any]]:
    """What `tree` shows of those that are not on the controller's machine."""
    done = composer_mesh("tree", str(run.root), "--json")
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["hosts"]
    return [one for host in hosts if host["name"] != "localhost" for one in host["processes"]]


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except FileNotFoundError:  # it has ended
        return ""


def two_hosts(runs: SideBySide, folder: Path) -> TwoHosts:
    with own_temporary_folder() as temporary:
        return _two_hosts(runs.cache, folder, temporary)


def _two_hosts(cache: Path, folder: Path, temporary: Path) -> TwoHosts:
    authority = folder / "authority"
    make_authority(authority)
    options = ("--listen", "tls://127.0.0.1:0", "--lease", str(LEASE_S))
    variables = {"TMPDIR": str(temporary)}
    with ExitStack() as stack:

        def started(name: str) -> Worker:
            env = {**current_environment(), **variables}
            return stack.enter_context(worker(folder, name, authority, *options, env=env))

        workers = [started(f"w-{number}") for number in range(2)]
        settings = ENDLESS | on_hosts(workers, authority) | {"generator.replicas": 2}
        place = folder / "run"
        run = stack.enter_context(launched(place, cache, settings, variables=variables))
        run.until_training()
        run.until(lambda run: len(set(hosts_of_actors(run).values())) == 3, "actors on all hosts")
        actors = hosts_of_actors(run)
        families = [one.family() for one in workers]
        knowing = [one for pids in families for one in pids if TOKEN_ENV in environment(one)]
        run.until(
            lambda run: any(one["rss_bytes"] and one["cpu_percent"] for one in remote(run)),
            "what processes use of other hosts",
        )
        stacks = composer_mesh("stacks", str(run.root), "--json") if can_read_stacks() else None

        lost = hosts_of_actors(run)["generator-0"]
        dying = workers[int(lost[-1])]
        dying.kill()
        run.until(lambda run: run.events("host_lost"), "loss of the host")
        run.until(replaced_generator, "generator on the other host")
        until_steps_more(run)
        run.until(lambda run: lost not in hosts_of_actors(run).values(), "no actor on the lost")

        new = started("w-2")
        joined = composer_mesh("join", str(run.root), new.address)
        scaled = composer_mesh("scale", str(run.root), "environment=3")
        run.until(lambda run: "joined-2" in hosts_of_actors(run).values(), "actors on the new one")
        until_steps_more(run)

        remaining = [one for one in (*workers, new) if one is not dying]
        last_families = [one.family() for one in remaining]
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        for one in remaining:
            one.until_gone(GONE_DEADLINE_S)
        said = [one.log.read_text() for one in remaining]
    remove_abandoned(temporary)
    left = list(temporary.iterdir())
    return TwoHosts(
        run, actors, families, knowing, stacks, joined, scaled, last_families, said, left
    )


def replaced_generator(run: LiveRun) -> bool:
    return any("generator-0.2" in one["actor"] for one in run.events("actor_restarted"))
