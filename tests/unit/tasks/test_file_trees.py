"""Trees of sandbox sessions are always ones that a folder can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from composer_mesh.tasks.sandbox import (
    LARGEST_EDITS,
    CommandResult,
    FileTree,
    SandboxSession,
)

TREE = FileTree({"a.py": b"a", "lib/b.py": b"b"})


@pytest.mark.parametrize("path", ["a.py/below", "lib", "a.py/x/y.py", "n" * 256, "x/" + "é" * 128])
def test_an_edit_that_no_folder_can_hold_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"file and a folder|no path below"):
        TREE.with_edit(path, b"x")


def test_a_folder_may_take_the_place_of_a_removed_file() -> None:
    edited = TREE.with_edit("a.py", None).with_edit("a.py/below", b"x")
    assert edited.files() == ["a.py/below", "lib/b.py"]
    assert TREE.with_edits({"lib": b"file", "lib/b.py": None}).files() == ["a.py", "lib"]


def test_more_edits_than_a_box_takes_are_refused() -> None:
    half = bytes(LARGEST_EDITS // 2)
    edited = TREE.with_edit("x", half).with_edit("y", half)
    with pytest.raises(ValueError, match="write less"):
        edited.with_edit("z", b"x")
    assert edited.with_edit("x", b"small").with_edit("z", b"x").read("z") == b"x"


class Reports:
    """A sandbox whose commands report given changes."""

    def __init__(self, changed: Mapping[str, bytes | None]) -> None:
        self._changed = changed

    async def run(self, tree: FileTree, argv: Any, **_: Any) -> CommandResult:
        return CommandResult(0, "exited", b"", b"", False, 0.0, self._changed, ())

    async def close(self) -> None:
        """Nothing is open."""


def after(changed: Mapping[str, bytes | None]) -> tuple[list[str], CommandResult]:
    session = SandboxSession(Reports(changed), TREE)
    result = asyncio.run(session.exec(["x"]))
    return session.list(), result


def test_changes_that_no_folder_can_hold_are_refused_and_the_others_taken() -> None:
    files, result = after({"a.py/below": b"x", "good.py": b"g", "lib": b"file"})
    assert files == ["a.py", "good.py", "lib/b.py"]
    assert result.changed == {"good.py": b"g"}
    assert set(result.refused_paths) == {"a.py/below", "lib"}


def test_of_changes_that_are_too_much_the_smallest_are_taken() -> None:
    files, result = after({"big": bytes(LARGEST_EDITS), "small": b"s"})
    assert files == ["a.py", "lib/b.py", "small"]
    assert result.refused_paths == ("big",)


def test_changes_of_a_folder_into_a_file_are_taken() -> None:
    files, result = after({"lib/b.py": None, "lib": b"file"})
    assert files == ["a.py", "lib"]
    assert result.refused_paths == ()
