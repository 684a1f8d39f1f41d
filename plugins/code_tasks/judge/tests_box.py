"""Runs tests in a fresh box and reads what was reported."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.plugins.code_tasks.judge.channel import Report, read_report
from composer_mesh.plugins.code_tasks.judge.programs.bundle import ARGV, Program, stdin_of
from composer_mesh.tasks.sandbox import CommandResult, FileTree, Sandbox, SandboxLimits

LIMIT_FLAGS = {"wall_time": "timeout", "cpu_time": "timeout", "memory": "memory"}


@dataclass(frozen=True)
class Start:
    """How the interpreter of a program is started."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


UNSEEDED = Start(ARGV)
"""The usual way: nothing of the environment but PYTHONPATH is read."""


@dataclass(frozen=True)
class BoxReport:
    """What a program reported from a box, and how the box ended."""

    report: Report
    result: CommandResult
    flags: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing contradicts the report; it may still be forged."""
        return not self.report.faults and not any(kind in self.flags for kind in UNSOUND)


UNSOUND = ("tamper", "early_exit", "channel", "canary", "timeout", "memory", "crash", "output_cut")
"""Kinds of flags with which test results are not believed."""


@dataclass(frozen=True)
class TestResults:
    """Outcomes of tests by id: "passed", "failed", "skipped", "xfail" or "error"."""

    outcomes: Mapping[str, str]
    failures: Mapping[str, str]
    collection: tuple[str, ...]
    box: BoxReport

    def passed(self, tests: Sequence[str]) -> list[str]:
        """Return those of the tests that passed."""
        return [one for one in tests if self.outcomes.get(one) == "passed"]


async def run_program(
    sandbox: Sandbox,
    tree: FileTree,
    program: Program,
    spec: dict[str, Any],
    limits: SandboxLimits,
    start: Start = UNSEEDED,
) -> BoxReport:
    """Run a program of ours on a tree. Waits for a box; raises SandboxError where that fails."""
    mark = secrets.token_hex(16)
    stdin = stdin_of(program, {**spec, "mark": mark})
    result = await sandbox.run(
        tree, start.argv, stdin=stdin, limits=limits, environment=start.environment
    )
    report = read_report(result.stdout, mark, result.output_cut)
    return BoxReport(report, result, _flags(report, result))


async def run_tests(
    sandbox: Sandbox,
    tree: FileTree,
    files: Sequence[str],
    wanted: Sequence[str] | None,
    imports: Sequence[str],
    changed: Sequence[str],
    limits: SandboxLimits,
) -> TestResults:
    """Run the wanted tests of some files, all of them if `wanted` is None. Waits for a box."""
    spec = {
        "imports": list(imports),
        "files": list(files),
        "wanted": None if wanted is None else list(wanted),
        "changed": list(changed),
        "conftest": any(path.rpartition("/")[2] == "conftest.py" for path in tree.files()),
    }
    box = await run_program(sandbox, tree, "run_tests", spec, limits)
    lines = [line for line in box.report.of("test") if isinstance(line.get("id"), str)]
    outcomes = {line["id"]: str(line.get("outcome")) for line in lines}
    failures = {line["id"]: str(line.get("text", "")) for line in lines if line.get("text")}
    collection = tuple(str(line.get("text", "")) for line in box.report.of("collection"))
    if len(outcomes) != len(lines):
        box = BoxReport(box.report, box.result, {**box.flags, "channel": 1})
    return TestResults(outcomes, failures, collection, box)


def _flags(report: Report, result: CommandResult) -> dict[str, int]:
    """Return what a run says of itself, and what its end does, by kind."""
    flags: Counter[str] = Counter()
    if (limit := LIMIT_FLAGS.get(result.ended)) is not None:
        flags[limit] += 1
    elif "output_cut" in report.faults:
        flags["output_cut"] += 1
    elif "early_exit" in report.faults:
        flags["crash" if result.ended == "signal" else "early_exit"] += 1
    if report.faults - {"early_exit", "output_cut"}:
        flags["channel"] += 1
    if report.end is not None:
        flags["tamper"] += _count(report.end.get("tampered"))
        flags.update(_audit(report.end.get("audit")))
    return {kind: count for kind, count in sorted(flags.items()) if count > 0}


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _audit(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    return {
        f"runtime_{kind}": min(count, 1_000_000)
        for kind, count in value.items()
        if kind in AUDITED and isinstance(count, int)
    }


AUDITED = frozenset(
    {
        *("process", "network", "native_code", "object_inspection", "frame_inspection"),
        *("forbidden_import", "file_write"),
    }
)
