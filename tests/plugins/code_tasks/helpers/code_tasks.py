"""A small coding task for unit tests, and boxes that answer without running anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from code_rows import FILES, OTHER, RIGHT, TEST

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask
from composer_mesh.tasks.sandbox import CommandResult, FileTree, SandboxError, SandboxLimits

TASK = JudgedTask(
    name="double",
    files=FILES,
    sources=("lib",),
    fail_to_pass=(TEST,),
    pass_to_pass=(OTHER,),
    targets=("lib.sums:double",),
    cases=(
        HiddenCase("lib.sums:double", (3,), {}, {"returned": 6}),
        HiddenCase("lib.sums:double", (-1,), {}, {"returned": -2}),
    ),
)

Answer = Callable[[dict[str, Any], FileTree], list[dict[str, Any]]]


class ScriptedBoxes:
    """Boxes in which our programs say what a function of their spec and the tree says."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.trees: list[FileTree] = []
        self.specs: list[dict[str, Any]] = []
        self.commands: list[Sequence[str]] = []
        self.error: Exception | None = None
        self.result: dict[str, Any] = {}
        self.closed = False
        self._answer = answer or honest

    async def run(
        self,
        tree: FileTree,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008
        environment: Mapping[str, str] = {},
    ) -> CommandResult:
        self.trees.append(tree)
        self.commands.append(argv)
        spec = json.loads(stdin.split(b"\n", 1)[1][int(stdin.split(b"\n")[0]) :]) if stdin else {}
        if self.error is not None and "modules" not in spec:
            raise self.error
        stdout = b""
        if spec:
            self.specs.append(spec)
            answer = copied if "modules" in spec else self._answer
            stdout = said(spec["mark"], answer(spec, tree))
        about = {"exit_code": 0, "ended": "exited", "stdout": stdout, "stderr": b"", "changed": {}}
        about |= {"output_cut": False, "seconds": 0.1, "refused_paths": ()}
        return CommandResult(**{**about, **self.result})

    async def close(self) -> None:
        self.closed = True


class BrokenBoxes(ScriptedBoxes):
    """Boxes that cannot be started, once a task was accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.error = SandboxError("no box could be started")


def said(mark: str, lines: list[dict[str, Any]]) -> bytes:
    """Return lines as a program reports them."""
    numbered = [{"mark": mark, "number": place, **line} for place, line in enumerate(lines)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in numbered)


def copied(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
    """Return what a box says that has no copy of any module or body."""
    return [{"kind": "end", "lines": 0}]


def honest(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
    """Return what honest programs say of a tree: right if it has `RIGHT`."""
    right = tree.read("lib/sums.py") == RIGHT
    if "calls" in spec:
        doubled = [2 * one["arguments"][0] if right else None for one in spec["calls"]]
        lines = [values(place, one) for place, one in enumerate(doubled)]
        return [*lines, {"kind": "end", "lines": len(lines), "audit": {}}]
    wanted = spec["wanted"] or [TEST]
    return reported_tests(
        wanted, [one for one in wanted if one == OTHER or (one == TEST and right)]
    )


def values(place: int, returned: Any) -> dict[str, Any]:
    """Return the line of a value."""
    return {"kind": "value", "place": place, "returned": returned}


def reported_tests(
    wanted: Sequence[str], passed: Sequence[str], **end: Any
) -> list[dict[str, Any]]:
    """Return the lines of a run of tests."""
    lines: list[dict[str, Any]] = [
        {"kind": "test", "id": one, "outcome": "passed"}
        if one in passed
        else {"kind": "test", "id": one, "outcome": "failed", "text": "E  assert 1 == 2"}
        for one in wanted
    ]
    return [*lines, {"kind": "end", "lines": len(lines), "tampered": [], "audit": {}, **end}]


def open_scripted(**_: Any) -> ScriptedBoxes:
    """Return boxes in which no test runs, as environment.sandbox.kind names them."""
    return ScriptedBoxes(lambda spec, tree: [])
