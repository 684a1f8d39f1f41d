"""A run on two hosts that loses one, gets another, and leaves nothing on any of them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from live_run import ENDLESS, LiveRun, can_read_stacks, composer_mesh, launched, wait_until
from workers import Worker, net, worker

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.mesh.hosts.certificates import make_authority
from composer_mesh.mesh.private_folder import remove_abandoned

LEASE_S = 8.0
GONE_DEADLINE_S = 30.0
"""From the end of the controller to that of the last process on any host."""


def on_hosts(workers: list[Worker], authority: Path) -> dict[str, object]:
    """The settings of a run on these workers."""
    return {
        "cluster.kind": "hosts",
        "cluster.workers": json.dumps([one.address for one in workers]),
        "cluster.authority": authority,
        "cluster.lease_s": LEASE_S,
    }


def step(run: LiveRun) -> int:
    return len(run.lines("metrics.jsonl"))


def until_steps_more(run: LiveRun, number: int = 2) -> None:
    begin = step(run)
    run.until(lambda run: step(run) >= begin + number, f"{number} steps more")


def hosts_of_actors(run: LiveRun) -> dict[str, str]:
    status = json.loads((run.root / "status.json").read_text())
    return {actor["name"]: actor["host"] for actor in status["actors"]}


def remote(run: LiveRun) -> list[dict[str, Any]]:
    """What `tree` shows of those that are not on the controller's machine."""
    done = composer_mesh("tree", str(run.root), "--json")
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["hosts"]
    return [one for host in hosts if host["name"] != "localhost" for one in host["processes"]]


def test_a_run_on_two_hosts_outlives_one_takes_another_and_leaves_none(
    tmp_path: Path, policy_cache: Path, temporary: Path
) -> None:
    authority = tmp_path / "authority"
    make_authority(authority)
    options = ("--listen", "tls://127.0.0.1:0", "--lease", str(LEASE_S))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker(tmp_path, f"w-{number}", authority, *options))
            for number in range(2)
        ]
        settings = ENDLESS | on_hosts(workers, authority) | {"generator.replicas": 2}
        run = stack.enter_context(launched(tmp_path / "run", policy_cache, settings))
        run.until_training()
        run.until(lambda run: len(set(hosts_of_actors(run).values())) == 3, "actors on all hosts")
        assert hosts_of_actors(run)["expert_server"] == "localhost"
        assert [one for one in workers if not one.family()] == []
        started = [pid for one in workers for pid in one.family()]
        assert [pid for pid in started if TOKEN_ENV in environment(pid)] == []
        assert (run.root / "logs" / "monarch-generator-0.log").exists()
        run.until(
            lambda run: any(one["rss_bytes"] and one["cpu_percent"] for one in remote(run)),
            "what processes use of other hosts",
        )
        if can_read_stacks():
            done = composer_mesh("stacks", str(run.root), "--json")
            assert done.returncode == 0, done.stdout + done.stderr
            read = {one["process"] for one in map(json.loads, done.stdout.splitlines())}
            assert read >= {"controller", *hosts_of_actors(run)}

        lost = hosts_of_actors(run)["generator-0"]
        dying = workers[int(lost[-1])]
        dying.kill()
        run.until(lambda run: run.events("host_lost"), "loss of the host")
        run.until(
            lambda run: any(
                "generator-0.2" in one["actor"] for one in run.events("actor_restarted")
            ),
            "generator on the other host",
        )
        until_steps_more(run)
        run.until(lambda run: lost not in hosts_of_actors(run).values(), "no actor on the lost")

        new = stack.enter_context(worker(tmp_path, "w-2", authority, *options))
        done = composer_mesh("join", str(run.root), new.address)
        assert done.returncode == 0, done.stderr
        done = composer_mesh("scale", str(run.root), "environment=3")
        assert done.returncode == 0, done.stderr
        run.until(lambda run: "joined-2" in hosts_of_actors(run).values(), "actors on the new one")
        until_steps_more(run)

        left = [one for one in (*workers, new) if one is not dying]
        assert all(len(one.family()) > 2 for one in left)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        for one in left:
            one.until_gone(GONE_DEADLINE_S)
            assert f"nothing was heard of the controller for {LEASE_S:g} s" in one.log.read_text()
    remove_abandoned(temporary)
    assert list(temporary.iterdir()) == []
    assert [path for path in run.root.rglob("*") if path.stat().st_mode & 0o077] == []


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except FileNotFoundError:  # it has ended
        return ""


def test_a_host_that_is_cut_off_ends_its_own_and_the_run_goes_on(
    tmp_path: Path, policy_cache: Path
) -> None:
    authority = tmp_path / "authority"
    make_authority(authority)
    options = ("--lease", str(LEASE_S), "--listen", "tls://auto:0")
    with ExitStack() as stack:
        made = stack.enter_context(net())
        workers = [
            stack.enter_context(
                worker(tmp_path, f"w-{number}", authority, *options, within=made.within(number))
            )
            for number in (1, 2)
        ]
        assert [one.address.rpartition(":")[0] for one in workers] == [
            "tls://10.77.0.2",
            "tls://10.77.0.3",
        ]
        settings = ENDLESS | on_hosts(workers, authority)
        within = made.within(0)
        run = stack.enter_context(launched(tmp_path / "run", policy_cache, settings, within=within))
        run.until_training()
        lost = hosts_of_actors(run)["generator-0"]
        number = int(lost[-1]) + 1
        made.cut(number)
        workers[number - 1].until_gone(3 * LEASE_S)
        run.until(lambda run: run.events("host_lost"), "loss of the host")
        made.heal(number)
        until_steps_more(run)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        for one in workers:
            one.until_gone(GONE_DEADLINE_S)
    assert "the run gave this host back" in workers[2 - number].log.read_text()


def test_a_host_that_does_not_see_the_files_of_the_run_is_refused_by_name(
    tmp_path: Path, policy_cache: Path
) -> None:
    authority = tmp_path / "authority"
    make_authority(authority)
    options = ("--listen", "tls://127.0.0.1:0", "--wait", "60")
    private = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs none {tmp_path}/runs && exec "$@"',
    ]
    (tmp_path / "runs").mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may give a host a file system of its own")
    with worker(tmp_path, "w-0", authority, *options, within=[*private, "sh"]) as elsewhere:
        settings = on_hosts([elsewhere], authority)
        with launched(tmp_path / "runs" / "run", policy_cache, settings) as run:
            assert run.wait() == 1
        assert "host-0 does not see" in run.stderr
        assert "a file system that all hosts share" in run.stderr
        elsewhere.until_gone(GONE_DEADLINE_S)
    wait_until(lambda: not run.living(), "end of the run", GONE_DEADLINE_S)
