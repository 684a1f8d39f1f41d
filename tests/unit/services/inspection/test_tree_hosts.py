"""A run on several hosts, seen from outside: each process under its host, by the run's names.

Every actor of a run is counted once, whether it answers or not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from composer_mesh.mesh.admin import ActorNode, HostNode, MeshTree, ProcNode
from composer_mesh.mesh.machine import this_host
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, MeshError, RemoteError
from composer_mesh.services.directory.status import (
    ActorStatus,
    RunStatus,
    read_status,
    write_status,
)
from composer_mesh.services.inspection.census import (
    ActorName,
    census,
    failure_line,
    parse_name,
    placed,
)
from composer_mesh.services.inspection.tree import CpuMeter, ProcessUsage, Viewer, merge, pids_of
from composer_mesh.services.inspection.tree_page import MeshPage

STATUS = RunStatus(
    pid=os.getpid(),
    admin_url=None,
    state="training",
    step=3,
    steps=20,
    policy_version=3,
    transport="tcp",
    restarts=2,
)


def drawn(about: dict[str, Any]) -> list[str]:
    console = Console(width=200, file=StringIO(), color_system=None)
    console.print(MeshPage(about))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


TWO_HOSTS = MeshTree(
    (
        HostNode("unix:@x", (ProcNode("local", rss_bytes=1 << 20),)),
        HostNode(
            "tls:10.0.0.5:22300", (ProcNode("trainer-0", (ActorNode("trainer", "idle", 1, 4),)),)
        ),
        HostNode("tls:10.0.0.6:22300", (ProcNode("generator-0-0", rss_bytes=7 << 20),)),
    )
)
ON_TWO_HOSTS = dataclasses.replace(
    STATUS,
    host="another boot",
    hostname="login-1",
    hosts={"tls:10.0.0.5:22300": "node-0", "tls:10.0.0.6:22300": "node-1"},
    actors=(
        ActorStatus("trainer", "trainer", 11, host="node-0", rss_bytes=3 << 20, cpu_percent=96.0),
        ActorStatus("generator-0", "generator", 12, host="node-1"),
        ActorStatus("generator-1.2", "generator", 11, "starting", host="node-1"),
        ActorStatus("expert_server", "expert_server", 14, host="localhost"),
    ),
)


def test_hosts_have_the_names_that_the_run_has_for_them_and_what_they_tell_themselves() -> None:
    about = merge(
        "quick", ON_TWO_HOSTS, TWO_HOSTS, ProcessUsage({11: 1.0, 12: 2.0}, {11: 1, 12: 2})
    )
    assert [host["name"] for host in about["hosts"]] == ["localhost", "node-0", "node-1"]
    used = {
        process["name"]: (process["rss_bytes"], process["cpu_percent"])
        for host in about["hosts"]
        for process in host["processes"]
    }
    assert used["trainer"] == (3 << 20, 96.0), "as its host says, not who has its number here"
    assert used["generator-0"] == (7 << 20, None)
    assert {one["name"]: one["rss_bytes"] for one in about["missing"]}["generator-1.2"] is None
    assert (about["host"], about["hostname"]) == ("another boot", "login-1")


def test_a_page_of_several_hosts_has_each_process_under_its_host() -> None:
    lines = drawn(merge("quick", ON_TWO_HOSTS, TWO_HOSTS))
    found = [line.split()[1] if line.startswith("host ") else line.split()[0] for line in lines[1:]]
    names = [one for one in found if one not in ("process", "and")]
    assert names == [
        *("localhost", "controller", "expert_server"),
        *("node-0", "trainer"),
        *("node-1", "generator-0", "generator-1.2"),
    ]


def test_without_an_admin_server_hosts_are_told_by_the_run() -> None:
    lines = drawn(merge("quick", ON_TWO_HOSTS, None))
    assert [line.split()[1] for line in lines if line.startswith("host ")] == [
        *("node-0", "node-1", "localhost"),
    ]


def test_only_processes_of_the_controllers_machine_are_looked_up_there() -> None:
    assert pids_of(ON_TWO_HOSTS) == [os.getpid(), 14]


def test_a_run_of_another_machine_is_live_until_it_says_that_it_ended() -> None:
    gone = subprocess_that_has_ended()
    here = dataclasses.replace(STATUS, pid=gone, host=this_host())
    assert not here.live
    elsewhere = dataclasses.replace(here, host="another boot")
    assert elsewhere.live
    assert not dataclasses.replace(elsewhere, state="finished").live


def subprocess_that_has_ended() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_status_of_an_earlier_version_is_read_as_one_of_this_machine(tmp_path: Path) -> None:
    old = dataclasses.asdict(STATUS)
    for key in ("host", "hostname", "hosts"):
        del old[key]
    old["actors"] = [{k: v for k, v in one.items() if k != "host"} for one in old["actors"]]
    (tmp_path / "status.json").write_text(json.dumps(old))
    assert read_status(tmp_path) == STATUS


def test_nothing_of_this_machine_is_measured_for_a_run_of_another(tmp_path: Path) -> None:
    actor = ActorStatus("trainer", "trainer", os.getpid())
    for host, found in (("another boot", False), (this_host(), True)):
        write_status(tmp_path, dataclasses.replace(STATUS, host=host, actors=(actor,)))
        (process,) = Viewer(tmp_path).look()["missing"]
        assert (process["rss_bytes"] is not None) == found


class FakePool:
    def __init__(self, *lines: dict[str, Any]) -> None:
        self._lines = list(lines)

    def status(self) -> list[dict[str, Any]]:
        return self._lines


def line(name: str, state: str = "ready", pid: int | None = 1, **more: Any) -> dict[str, Any]:
    about = {"generation": parse_name(name).generation, "outstanding": 0, "reason": "", **more}
    return {"name": name, "state": state, "pid": pid, **about}


def test_an_actor_outside_the_pools_is_as_it_said() -> None:
    trainer = ActorStatus("trainer", "trainer", 1, "busy", 3, "forward")
    assert census([trainer], {}) == (trainer,)


def test_an_actor_outside_the_pools_is_shown_as_dead_until_its_successor_is_there() -> None:
    before = [ActorStatus("trainer", "trainer", 1, "busy", 3, "forward", restarts=0)]
    (gone,) = census([], {}, before)
    assert (gone.name, gone.state, gone.pid) == ("trainer", "dead", None)
    assert census([], {}, [gone]) == (gone,)
    (one,) = census([ActorStatus("trainer.2", "trainer", 2)], {}, [gone])
    assert (one.name, one.state, one.restarts) == ("trainer.2", "ready", 1)
    assert census([], {"trainer": FakePool()}, before) == ()


def test_a_replica_that_answers_tells_what_it_does_and_its_pool_how_much_it_has() -> None:
    said = ActorStatus("w-0.3", "w", 7, "busy", 2, "work")
    (one,) = census([said], {"w": FakePool(line("w-0.3", outstanding=5))})
    assert (one.state, one.activity, one.restarts, one.outstanding) == ("busy", "work", 2, 5)


@pytest.mark.parametrize("state", ["starting", "draining", "dead", "stopped", "anything"])
def test_what_the_pool_says_of_a_replica_that_does_not_serve_counts(state: str) -> None:
    said = ActorStatus("w-0", "w", 7, "ready", 2, "idle")
    (one,) = census([said], {"w": FakePool(line("w-0", state, reason="why"))})
    assert (one.state, one.activity) == (state, "why")


def test_a_death_that_the_pool_has_not_heard_of_is_shown() -> None:
    said = ActorStatus("w-0", "w", 7, "dead", None, "Killed(sig=9)")
    (one,) = census([said], {"w": FakePool(line("w-0"))})
    assert (one.state, one.activity) == ("dead", "Killed(sig=9)")


def test_replicas_without_an_answer_stand_with_their_kind_in_the_order_of_their_places() -> None:
    actors = [
        ActorStatus("trainer", "trainer", 1),
        *(ActorStatus(f"w-{place}", "w", 1) for place in (10, 2)),
        ActorStatus("v-0", "v", 1),
    ]
    pools = {
        "v": FakePool(line("v-0")),
        "w": FakePool(
            line("w-10"), line("w-2"), line("w-1", "dead"), line("w-1.2", "starting", None)
        ),
    }
    names = [(one.name, one.state) for one in census(actors, pools)]
    assert names == [
        ("trainer", "ready"),
        *(("w-1", "dead"), ("w-1.2", "starting"), ("w-2", "ready"), ("w-10", "ready")),
        ("v-0", "ready"),
    ]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trainer", ActorName("trainer")),
        ("trainer-1", ActorName("trainer", 1)),
        ("teacher_replay-12.34", ActorName("teacher_replay", 12, 34)),
        ("reference.2", ActorName("reference", 0, 2)),
        ("a.b", ActorName("a.b")),
        ("a-b", ActorName("a-b")),
        ("a.", ActorName("a.")),
        ("", ActorName("")),
    ],
)
def test_a_name_says_mesh_rank_and_generation(name: str, parts: ActorName) -> None:
    assert parse_name(name) == parts


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ActorDied("w-1.2", "Killed(sig=9)"), ["w-1.2 died: Killed(sig=9) (host "]),
        (DeadlineExceeded("w-1", "load", 2.0), ["w-1.load gave no answer within 2 s: "]),
        (RemoteError("w-1", "load", "a\nb"), ["w-1.load failed: (host ", "a", "b"]),
    ],
)
def test_a_failure_names_host_mesh_actor_rank_and_cause_in_its_first_line(
    error: MeshError, lines: list[str]
) -> None:
    first, *rest = failure_line(error, "here").splitlines()
    assert first.startswith(lines[0])
    assert first.endswith("(host here, mesh w, rank 1)")
    assert rest == lines[1:]


def test_what_an_event_says_of_a_process_has_its_mesh_and_rank() -> None:
    fields = {"host": "here", "cause": "gone"}
    assert placed("w-3.2", fields) == {"host": "here", "mesh": "w", "rank": 3, "cause": "gone"}
    assert placed("w-3", {"attempt": 2}) == {"attempt": 2}
    assert placed("", fields) == fields


def test_a_failure_of_no_actor_is_its_text() -> None:
    assert failure_line(MeshError("no replica is left"), "here") == "no replica is left"


def test_cpu_is_measured_between_two_looks() -> None:
    now = [100.0]
    meter = CpuMeter[int](lambda: now[0])
    assert meter.look({1: 10.0, 2: 0.0}) == {}
    now[0] += 2
    assert meter.look({1: 13.0, 2: 0.0, 3: 1.0}) == {1: 150.0, 2: 0.0}


def test_a_process_whose_number_another_has_now_is_a_new_one() -> None:
    now = [100.0]
    meter = CpuMeter[int](lambda: now[0])
    meter.look({1: 10.0})
    now[0] += 1
    assert meter.look({1: 0.5}) == {}
    now[0] += 1
    assert meter.look({1: 0.5}) == {1: 0.0}
