"""The supervision tree of a run: live, after its end, and with processes that died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dashboards import HOSTILE, Page, client, dashboard
from inspected_runs import group_of, write_run

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.mesh_tree import (
    TreeNode,
    nodes_of,
    rows_of,
    tree_of,
    with_dead,
)
from composer_mesh.services.directory.status import ActorStatus, RunStatus, write_status
from composer_mesh.services.inspection.tree import merge
from composer_mesh.services.store.group_files import path_of
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.traces.list_page import question
from composer_mesh.tasks.toolbox import ToolboxTask

ACTORS = (
    ActorStatus("trainer", "trainer", 11, "busy", 7, "training step 8"),
    ActorStatus("generator-0", "generator", 12, policy_version=7),
    ActorStatus("generator-1.2", "generator", 13, policy_version=6, restarts=1),
    ActorStatus("generator-2", "generator", 14, policy_version=7, host="there"),
)
STATUS = RunStatus(1, None, "running", 8, 20, 8, "shm", ACTORS, restarts=1)
EVENTS: list[dict[str, Any]] = [
    {"event": "actor_restarted", "actor": "generator-1.2", "time": 96.0, "detail": "in 3 s"},
    {"event": "actor_died", "actor": "generator-1", "time": 95.0},
    {"event": "checkpoint", "actor": "trainer", "time": 90.0},
    {"event": "run_started", "actor": "", "time": 1.0},
]
"""The newest first."""


def tree(state: str = "running", status: RunStatus = STATUS) -> TreeNode:
    found = tree_of(merge("run", status, None), EVENTS, state)
    assert found is not None
    return found


def node(of: TreeNode, name: str, level: str = "actor") -> TreeNode:
    (found,) = [one for one in nodes_of(of) if (one.name, one.level) == (name, level)]
    return found


def test_actors_hang_on_their_process_mesh_on_their_host_below_the_controller() -> None:
    shown = [("  " * len(row.guides) + row.node.name) for row in rows_of(tree())]
    assert shown == [
        "controller",
        "  localhost",
        "    generator",
        "      generator-0",
        "      generator-1.2",
        "    trainer",
        "  there",
        "    generator-2",
    ]
    rows = list(rows_of(tree()))
    assert [row.guides for row in rows[:6]] == [
        *((), ("tee",), ("line", "tee"), ("line", "line", "tee"), ("line", "line", "elbow")),
        ("line", "elbow"),
    ]
    assert rows[-1].guides == ("blank", "elbow")
    # A mesh of one actor is one row, in which it can still be scaled.
    assert [row.pool for row in rows] == ["", "", "generator", "", "", "", "", "generator"]


def test_each_node_has_its_version_its_restarts_and_its_newest_event() -> None:
    found = tree()
    kinds = {one.name: one.last.kind for one in nodes_of(found) if one.last and one.level != "mesh"}
    assert kinds["generator-1.2"] == "actor_restarted"
    assert kinds["trainer"] == "checkpoint"
    assert kinds["controller"] == "run_started"
    assert node(found, "generator-0").last is None
    pool = next(one for one in nodes_of(found) if (one.level, one.name) == ("mesh", "generator"))
    assert (pool.version, pool.restarts, pool.doing, pool.replicas) == ("v6–v7", 1, "2 ready", 2)
    assert node(found, "trainer", "mesh").replicas is None


def test_a_process_that_has_died_is_seen_though_another_one_has_its_place() -> None:
    events: list[dict[str, Any]] = [
        {"event": "actor_died", "actor": "generator-1", "time": 101.0},
        {"event": "actor_died", "actor": "generator-2", "time": 95.0, "fields": {"host": "there"}},
        {"event": "actor_died", "actor": "sdpo_teacher", "time": 96.0, "fields": {"host": "else"}},
        {"event": "actor_died", "actor": "trainer", "time": 89.0},
        {"event": "actor_died", "actor": "generator-0", "time": "broken"},
    ]
    found = with_dead(tree(), events, now=100.0)
    assert found is not None
    states = {one.name: one.state for one in nodes_of(found) if one.level == "actor"}
    assert states == {
        "trainer": "busy",
        "generator-0": "ready",
        "generator-1.2": "ready",
        "generator-1": "dead",
        "generator-2": "dead",
        "sdpo_teacher": "dead",
    }
    here, there = found.children
    assert [one.name for one in here.children] == ["generator", "sdpo_teacher", "trainer"]
    assert (here.doing, there.doing) == ("2 ready, 2 dead, 1 busy", "1 dead")
    assert with_dead(None, events, now=100.0) is None


def test_nothing_is_claimed_about_actors_whose_controller_was_killed() -> None:
    found = tree("died")
    assert {one.state for one in nodes_of(found) if one.level == "actor"} == {"unknown"}
    assert node(found, "trainer").version == "v7"


def test_a_status_without_actors_has_no_tree() -> None:
    assert tree_of(merge("run", replace(STATUS, actors=()), None), EVENTS, "finished") is None


async def test_the_tree_of_a_run_is_shown_after_its_end(
    tmp_path: Path, build_config: Callable[..., Config]
) -> None:
    with RunStore(tmp_path / "run", build_config()) as store:
        store.add_event("actor_restarted", "generator-1.2", "3 s after the end of generator-1")
    ended = tuple(replace(one, state="stopped", pid=None) for one in ACTORS)
    write_status(tmp_path / "run", replace(STATUS, state="finished", actors=ended))
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        page = Page((await browser.get("/runs/run/mesh")).text)
    rows = [about for tag, about in page.elements if tag == "tr" and "data-actor" in about]
    assert [(one["data-actor"], one["data-state"]) for one in rows] == [
        *(("generator-0", "stopped"), ("generator-1.2", "stopped")),
        *(("trainer", "stopped"), ("generator-2", "stopped")),
    ]
    assert "this is its mesh as the controller last saw it" in page.text
    assert "actor restarted" in page.text


@pytest.mark.parametrize("state", ["running", "finished"])
async def test_names_and_states_of_a_status_file_are_text(
    tmp_path: Path, build_config: Callable[..., Config], state: str
) -> None:
    with RunStore(tmp_path / "run", build_config()) as store:
        for text in HOSTILE.values():
            store.add_event(text, text, text)
        worked = dict.fromkeys(HOSTILE.values(), 1.0)
        busy = [[text, text, 0.0, 1.0] for text in HOSTILE.values()]
        line = {"step": 1, "began": 0.0, "ended": 2.0, "worked": worked, "busy": busy}
        store.add_timeline(line)
    actors = tuple(
        ActorStatus(text, text, None, text, activity=text, host=text) for text in HOSTILE.values()
    )
    write_status(tmp_path / "run", replace(STATUS, state=state, actors=actors, transport="<b>"))
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        for path in ("/runs/run/mesh", "/runs/run/"):
            Page((await browser.get(path)).text).check_harmless()


async def test_rollouts_have_their_prompt_but_where_their_file_is_damaged(
    tmp_path: Path, build_config: Callable[..., Config], toolbox: ToolboxTask
) -> None:
    groups = [group_of(toolbox, 0), group_of(toolbox, 1)]
    await write_run(tmp_path / "run", build_config(), groups)
    path_of(tmp_path / "run", 1).write_bytes(b"damaged")
    _, app = dashboard(tmp_path)
    async with client(app) as browser:
        page = Page((await browser.get("/runs/run/rollouts?sort=group")).text)
    shown = [about["title"] for tag, about in page.elements if about.get("class") == "prompt"]
    assert shown == [question(groups[0][0])] * len(groups[0]) + [""] * len(groups[1])
