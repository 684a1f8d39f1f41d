"""The status file and the page that is drawn from it, without a mesh."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from repository import ROOT
from rich.console import Console

from composer_mesh.mesh.admin import (
    ActorNode,
    AdminUnreachable,
    HostNode,
    MeshTree,
    ProcNode,
    read_mesh,
)
from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import (
    ActorStatus,
    NotRunning,
    RunStatus,
    newest_run,
    read_status,
    write_status,
)
from composer_mesh.services.inspection.tree import (
    ProcessUsage,
    Viewer,
    merge,
    pids_of,
    tree_command,
)
from composer_mesh.services.inspection.tree_page import MeshPage

GUIDE = ROOT / "docs" / "tree.md"
STATUS = RunStatus(
    pid=os.getpid(),
    admin_url=None,
    state="training",
    step=3,
    steps=20,
    policy_version=3,
    transport="tcp",
    restarts=2,
    actors=(
        ActorStatus("trainer", "trainer", 11, "busy", 3, "forward [2]"),
        ActorStatus("generator-0", "generator", 12, policy_version=2, outstanding=4),
        ActorStatus("generator-1.3", "generator", 13, policy_version=2, restarts=2),
    ),
)
COMING = ActorStatus("environment-0.2", "environment", None, "starting", activity="Killed(sig=9)")
MESH = MeshTree(
    (
        HostNode(
            "unix:@x",
            (
                ProcNode("service", system_actors=2),
                ProcNode("generator-1_3-0", reachable=False),
                ProcNode("generator-0-0", (ActorNode("generator-0", "failed: x", 0, 7),)),
                ProcNode("trainer-0", (ActorNode("trainer", "idle", 1, 42),), 2 << 20, 1),
                ProcNode("local", rss_bytes=1 << 20, system_actors=9),
            ),
        ),
    )
)
WITH_ONE_TO_COME = dataclasses.replace(STATUS, actors=(*STATUS.actors, COMING))
MANY = dataclasses.replace(
    STATUS,
    actors=tuple(
        ActorStatus(
            f"teacher_replay-{place}.12",
            "teacher_replay",
            1_000_000 + place,
            "busy",
            123_456,
            "asking the teachers about a state that has a long name, and then about others",
            restarts=11,
            outstanding=1_000_000,
        )
        for place in range(9)
    ),
)
HEAVY = ProcessUsage(
    dict.fromkeys(pids_of(MANY), 1234.5), dict.fromkeys(pids_of(MANY), 123_456 << 20)
)


def drawn(about: dict[str, Any], width: int = 200) -> list[str]:
    console = Console(width=width, file=StringIO(), color_system=None)
    console.print(MeshPage(about))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def cells(lines: list[str], name: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(f"  {name} "))
    return re.split(r" {2,}", line.strip())


def test_a_status_survives_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS == read_status(tmp_path / "status.json")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1, "actors": []}'])
def test_a_file_that_is_no_status_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_the_newest_live_run_is_found_and_without_one_the_newest(tmp_path: Path) -> None:
    for age, (name, state) in enumerate((("c", "finished"), ("b", "training"), ("a", "eval"))):
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, dataclasses.replace(STATUS, state=state))
        os.utime(tmp_path / name / "status.json", (1000 - age, 1000 - age))
    assert newest_run(tmp_path) == tmp_path / "b"
    write_status(tmp_path / "b", dataclasses.replace(STATUS, state="failed"))
    write_status(tmp_path / "a", dataclasses.replace(STATUS, state="stopped"))
    assert newest_run(tmp_path) == tmp_path / "a"
    assert newest_run(tmp_path / "c") is None


def test_the_mesh_and_the_status_are_joined_by_name() -> None:
    about = merge("quick", WITH_ONE_TO_COME, MESH)
    (host,) = about["hosts"]
    assert [(p["name"], p["pid"], p["state"], p["restarts"]) for p in host["processes"]] == [
        ("controller", os.getpid(), "ready", 0),
        ("trainer", 11, "busy", 0),
        ("generator-0", 12, "failed", 0),
        ("generator-1.3", 13, "dead", 2),
    ]
    actors = {a["name"]: a for p in host["processes"] for a in p["actors"]}
    assert [actors[name]["state"] for name in sorted(actors)] == ["failed", "dead", "busy"]
    assert actors["trainer"]["messages_processed"] == 42
    assert host["system"] == {"processes": 1, "actors": 11}
    (missing,) = about["missing"]
    assert (missing["name"], missing["pid"], missing["state"]) == (
        "environment-0.2",
        None,
        "starting",
    )
    assert json.loads(json.dumps(about)) == about


def test_the_system_is_believed_about_memory_and_the_admin_server_where_it_says_nothing() -> None:
    usage = ProcessUsage(cpu_percent={11: 97.5}, rss_bytes={11: 5 << 20})
    controller, trainer, *_ = merge("quick", STATUS, MESH, usage)["hosts"][0]["processes"]
    assert (trainer["cpu_percent"], trainer["rss_bytes"]) == (97.5, 5 << 20)
    assert (controller["cpu_percent"], controller["rss_bytes"]) == (None, 1 << 20)


def test_a_process_of_another_machine_is_not_taken_for_one_of_this_machine() -> None:
    far = MeshTree((dataclasses.replace(MESH.hosts[0], name="tcp:10.0.0.2:1"),))
    (host,) = merge("quick", STATUS, far, HEAVY)["hosts"]
    assert host["name"] == "tcp:10.0.0.2:1"
    assert [process["cpu_percent"] for process in host["processes"]] == [None] * 3


def test_a_wide_page_says_all_of_a_process() -> None:
    lines = drawn(merge("quick", WITH_ONE_TO_COME, MESH, ProcessUsage({11: 97.4}, {11: 2 << 20})))
    assert lines[0] == "quick  training  step 3/20  policy v3  restarts 2  transport tcp"
    titles = "process state policy restarts memory cpu queue calls messages pid"
    assert lines[2].split() == titles.split()
    assert cells(lines, "trainer") == [
        *("trainer", "forward [2]", "v3", "0", "2 MiB", "97 %", "1", "-", "42", "11"),
    ]
    assert cells(lines, "environment-0.2")[1] == "starting: Killed(sig=9)"
    assert "  and 11 actors of Monarch itself" in lines


@pytest.mark.parametrize("whose", ["the process this actor was running on", "its process"])
def test_a_narrow_page_has_room_for_what_killed_an_actor(whose: str) -> None:
    why = f"{whose} failed: Killed(sig=9)"
    dead = ActorStatus("teacher_replay-0", "teacher_replay", 12, "dead", activity=why)
    status = dataclasses.replace(STATUS, actors=(dead,))
    assert "dead: Killed(sig=9) " in drawn(merge("quick", status, None, HEAVY), 80)[-1]


@pytest.mark.parametrize("width", [80, 100, 119, 120, 200])
@pytest.mark.parametrize("status", [STATUS, WITH_ONE_TO_COME, MANY], ids=["few", "dead", "many"])
def test_a_page_fits_its_width_and_has_one_line_for_each_process(
    width: int, status: RunStatus
) -> None:
    lines = drawn(merge("quick", status, MESH if status is not MANY else None, HEAVY), width)
    assert max(map(len, lines)) <= width
    for actor in status.actors:
        (line,) = (line for line in lines if line.startswith(f"  {actor.name} "))
        assert "…" not in line[: len(actor.name) + 3]
        if actor.policy_version is not None:
            assert f" v{actor.policy_version} " in line
        assert f" {actor.restarts} " in line


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "[bold]x[/]", "\x9b31m"])
def test_no_text_of_a_run_is_markup_or_a_control_code(text: str) -> None:
    actor = ActorStatus(text, text, 1, text, activity=text)
    status = dataclasses.replace(STATUS, state=text, transport=text, actors=(actor,))
    lines = drawn(merge(text, status, None))
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


DIED = {
    "time": 0,
    "event": "actor_died",
    "actor": "generator-0",
    "detail": "[bold]killed[/]\x1b[2J",
    "fields": {"host": "localhost", "rank": 0},
}


@pytest.mark.parametrize("width", [80, 200])
def test_what_died_lately_stands_below_the_mesh_in_one_line_each(width: int) -> None:
    console = Console(width=width, file=StringIO(), color_system=None)
    console.print(MeshPage(merge("quick", STATUS, MESH), [DIED, {**DIED, "detail": "x" * 300}]))
    assert isinstance(console.file, StringIO)
    *_, title, first, second = console.file.getvalue().splitlines()
    assert title == "lately"
    assert "actor_died" in first
    assert "[bold]killed[/]" in first
    assert first.isprintable()
    assert ("rank=0" in first) == (width == 200)
    assert len(second) <= width
    assert second.endswith("…")


def test_a_viewer_keeps_the_last_events_that_tell_of_a_death_or_a_repair(tmp_path: Path) -> None:
    viewer = Viewer(tmp_path)
    assert viewer.recent_events() == []
    kinds = ["run_started", *["rollout_retried", "actor_died", "trainer_restarted"] * 5]
    lines = [json.dumps({"event": kind, "time": time}) for time, kind in enumerate(kinds)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "actor_d')
    assert [event["time"] for event in viewer.recent_events()] == [5, 6, 8, 9, 11, 12, 14, 15]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('ied", "time": 16}\n')
    assert [event["time"] for event in viewer.recent_events()][-2:] == [15, 16]


def test_without_an_admin_server_the_runs_own_word_is_drawn() -> None:
    about = merge("quick", STATUS, None)
    assert [process["name"] for process in about["missing"]] == [a.name for a in STATUS.actors]
    assert "no admin server answers: this is what the run itself reported last" in drawn(about)


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_guide_names_every_key_of_the_object_and_no_other() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", GUIDE.read_text(), re.MULTILINE))
    assert named == keys(merge("quick", WITH_ONE_TO_COME, MESH))


def test_no_run_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tree"]) == main(["tree", "gone"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "composer-mesh: runs/ holds no run: name the directory of one, or start one with "
        "composer-mesh train CONFIG",
        "composer-mesh: gone holds no run: name the directory of one, or start one with "
        "composer-mesh train CONFIG --output gone",
    ]


def test_of_a_run_that_is_not_live_the_last_status_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, state="failed"))
    with pytest.raises(NotRunning, match="is not running"):
        tree_command(tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "failed"


def test_a_live_run_without_a_mesh_is_printed_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, STATUS)
    assert tree_command(tmp_path, as_json=True) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["state"], about["mesh"], len(about["missing"])) == ("training", False, 3)


@pytest.mark.parametrize(
    "answer", [{}, [], 5, {"children": 5}, {"children": [5]}, {"children": [{}]}], ids=str
)
def test_another_program_behind_the_port_is_no_mesh(httpserver: HTTPServer, answer: object) -> None:
    httpserver.expect_request("/v1/root").respond_with_json(answer)
    httpserver.expect_request("/v1/x").respond_with_json({"children": []})
    with pytest.raises(AdminUnreachable, match="has the run ended"):
        read_mesh(httpserver.url_for("").rstrip("/"))
