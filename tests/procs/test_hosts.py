"""Hosts of a run that are cut off, or do not see its files."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from live_run import ENDLESS, GONE_DEADLINE_S, launched, wait_until
from two_hosts import LEASE_S, hosts_of_actors, on_hosts, until_steps_more
from workers import net, worker

from composer_mesh.mesh.hosts.certificates import make_authority


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
        workers[number - 1].until_gone(LEASE_S + GONE_DEADLINE_S)
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
