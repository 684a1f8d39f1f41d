"""The status file and the tree that is drawn from it, without a mesh."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from composer_mesh.mesh.admin import ActorNode, HostNode, MeshTree, ProcNode
from composer_mesh.services.status import (
    ActorStatus,
    RunStatus,
    newest_live_run,
    read_status,
    write_status,
)
from composer_mesh.services.tree import merge, render, tree_command

STATUS = RunStatus(
    pid=os.getpid(),
    admin_url=None,
    state="training",
    step=3,
    steps=20,
    policy_version=3,
    transport="tcp",
    actors=(
        ActorStatus("trainer", "trainer", 11, policy_version=3, activity="forward [2]"),
        ActorStatus("generator-0", "generator", 12, policy_version=2),
        ActorStatus("generator-1", "generator", 13, policy_version=2),
    ),
)
MESH = MeshTree(
    (
        HostNode(
            "unix:@x",
            (
                ProcNode("service", system_actors=2),
                ProcNode("local", rss_bytes=1 << 20, system_actors=9),
                ProcNode("trainer-0", (ActorNode("trainer", "idle", 1, 42),), 2 << 20, 1),
                ProcNode("generator-0-0", (ActorNode("generator-0", "failed: x", 0, 7),)),
                ProcNode("generator-1-0", reachable=False),
            ),
        ),
    )
)


def drawn(about: dict[str, object]) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(render(about))
        return console.export_text()


def test_a_status_survives_the_file_and_leaves_no_draft(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS == read_status(tmp_path / "status.json")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1, "actors": []}'])
def test_a_file_that_is_no_status_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_the_newest_run_that_is_alive_is_found(tmp_path: Path) -> None:
    for age, (name, state) in enumerate((("c", "finished"), ("b", "training"), ("a", "eval"))):
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, dataclasses.replace(STATUS, state=state))
        os.utime(tmp_path / name / "status.json", (1000 - age, 1000 - age))
    assert newest_live_run(tmp_path) == tmp_path / "b"
    assert newest_live_run(tmp_path / "c") is None


def test_the_mesh_and_the_status_are_joined_by_name() -> None:
    about = merge("quick", STATUS, MESH)
    (host,) = about["hosts"]
    assert [(p["name"], p["pid"]) for p in host["processes"]] == [
        ("controller", os.getpid()),
        ("trainer", 11),
        ("generator-0", 12),
        ("generator-1", 13),
    ]
    actors = {a["name"]: a for p in host["processes"] for a in p["actors"]}
    assert [actors[name]["state"] for name in sorted(actors)] == ["failed", "dead", "ready"]
    assert actors["trainer"]["messages_processed"] == 42
    assert host["system"] == {"processes": 1, "actors": 11}
    assert about["missing"] == []
    assert json.loads(json.dumps(about)) == about


def test_the_drawing_names_kind_state_version_and_memory() -> None:
    text = drawn(merge("quick", STATUS, MESH))
    assert "quick  training  step 3/20  policy v3  transport tcp" in text
    assert "process trainer  pid 11  2 MiB" in text
    assert "trainer trainer  ready  policy v3  forward [2]  queue 1  messages 42" in text


def test_without_an_admin_server_the_runs_own_word_is_drawn() -> None:
    about = merge("quick", STATUS, None)
    assert [actor["name"] for actor in about["missing"]] == [a.name for a in STATUS.actors]
    assert "the admin server does not answer" in drawn(about)


def test_no_live_run_is_one_sentence_and_status_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tree_command(None) == 1
    assert capsys.readouterr().err == (
        "looked for a live run under runs/ and found none: "
        "start one with composer-mesh train CONFIG\n"
    )
    assert tree_command(tmp_path / "gone") == 1


def test_a_live_run_without_a_mesh_is_printed_as_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, STATUS)
    assert tree_command(tmp_path, as_json=True) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["state"], about["mesh"], len(about["missing"])) == ("training", False, 3)
