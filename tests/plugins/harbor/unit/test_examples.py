"""The example tasks are in the public format, and use no more of it than is played here."""

from __future__ import annotations

from pathlib import Path

from harbor_folders import made

from composer_mesh.rollouts.tool_calls import parse_action

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"
EASIEST = ("write-hello", "write-yes", "make-folder", "empty-file", "copy-file")


def test_there_are_thirty_and_all_can_be_played() -> None:
    task = made(EXAMPLES)
    rows = [*(task.rows("train") or []), *(task.rows("heldout") or [])]
    assert len(rows) == 30
    assert task.has_expert
    assert not any("ignored" in one or "left out" in one for one in task.remarks())
    folders = [task.folder_of(row) for row in rows]
    servers = sum(bool(one.toml.environment.mcp_servers) for one in folders)
    assert (servers, sum(len(one.steps) > 1 for one in folders)) == (2, 3)
    assert sum(one.toml.verifier.separate for one in folders) == 1


def test_the_easiest_are_one_short_command() -> None:
    task = made(EXAMPLES)
    for row in [*(task.rows("train") or []), *(task.rows("heldout") or [])]:
        if row["name"] in EASIEST:
            call, end = map(parse_action, task.gold(row))
            assert (call.name, end.name) == ("bash", "submit")
            assert list(call.arguments) == ["command"]
            assert len(call.arguments["command"]) < 30
