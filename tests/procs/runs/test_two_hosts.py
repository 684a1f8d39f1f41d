"""A run on two hosts that loses one, gets another, and leaves nothing on any of them."""

from __future__ import annotations

import json

from two_hosts import LEASE_S, TwoHosts

SERVED = ("generate", "generate_round")
"""Calls of rollout workers, of which the controller learns from the generators alone."""


def test_each_host_has_processes_of_the_run_and_the_key_of_experts_stays_on_the_first(
    two_hosts: TwoHosts,
) -> None:
    assert all(two_hosts.families)
    assert two_hosts.actors["expert_server"] == "localhost"
    assert two_hosts.knowing == []
    assert (two_hosts.run.root / "logs" / "monarch-generator-0.log").exists()


def test_stacks_are_read_on_every_host(two_hosts: TwoHosts) -> None:
    if two_hosts.stacks is not None:
        done = two_hosts.stacks
        assert done.returncode == 0, done.stdout + done.stderr
        read = {one["process"] for one in map(json.loads, done.stdout.splitlines())}
        assert read >= {"controller", *two_hosts.actors}


def test_actors_of_other_hosts_report_what_they_did_for_each_other(two_hosts: TwoHosts) -> None:
    lines = two_hosts.run.objects("timeline.jsonl")
    worked = {name for line in lines for name, seconds in line["worked"].items() if seconds}
    served = {name for line in lines for name, endpoint, *_ in line["busy"] if endpoint in SERVED}
    away = {name for name, host in two_hosts.actors.items() if host != "localhost"}
    assert {"generator", "environment"} <= {name.partition("-")[0] for name in worked & away}
    assert any(name.startswith("generator-") for name in served & away)


def test_another_host_joins_a_run_that_lost_one(two_hosts: TwoHosts) -> None:
    assert two_hosts.joined.returncode == 0, two_hosts.joined.stderr
    assert two_hosts.scaled.returncode == 0, two_hosts.scaled.stderr
    assert two_hosts.run.events("host_lost")


def test_a_killed_controller_leaves_no_process_on_any_host_and_no_file_beside_the_run(
    two_hosts: TwoHosts,
) -> None:
    assert all(len(family) > 2 for family in two_hosts.last_families)
    for said in two_hosts.said:
        assert f"the controller was silent for {LEASE_S:g} s" in said
    assert two_hosts.left == []
    run = two_hosts.run
    assert [path for path in run.root.rglob("*") if path.stat().st_mode & 0o077] == []
