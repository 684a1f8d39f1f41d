"""A run on several hosts, seen from outside: each process under its host, by the run's names."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.mesh.admin import ActorNode, HostNode, MeshTree, ProcNode
from composer_mesh.mesh.machine import this_host
from composer_mesh.services.directory.status import (
    ActorStatus,
    RunStatus,
    read_status,
    write_status,
)
from composer_mesh.services.inspection.tree import ProcessUsage, Viewer, merge, pids_of
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
