"""Runs tests, or calls functions on hidden inputs, in a fresh box, and reads what was reported.

Agent code may have written any of a report, and nothing here makes it trustworthy: it is checked
for what honest programs never do, and the rest is believed as far as the verdict does not rest on
it. The box gets the inputs of hidden cases only, and values are compared out here: whoever forges
answers has to know the right values.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask
from composer_mesh.plugins.code_tasks.judge.programs.bundle import ARGV, Program, stdin_of
from composer_mesh.tasks.sandbox import CommandResult, FileTree, Sandbox, SandboxLimits

LONGEST_LINE = 4_000_000
MOST_LINES = 200_000


@dataclass(frozen=True)
class TestReport:
    """The lines of a program in order. `faults` names what an honest program never does."""

    lines: tuple[Mapping[str, Any], ...] = ()
    end: Mapping[str, Any] | None = None
    faults: frozenset[str] = field(default_factory=frozenset)

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]


def read_report(stdout: bytes, mark: str, cut: bool = False) -> TestReport:
    """Return the lines with the mark, up to the first that is out of order."""
    lines: list[Mapping[str, Any]] = []
    faults = {"output_cut"} if cut else set[str]()
    for raw in stdout.split(b"\n")[:MOST_LINES]:
        if not raw.strip():
            continue
        line = _parsed(raw)
        if line is None or line.get("mark") != mark:
            faults.add("foreign_output")
        elif line.get("number") != len(lines) or (lines and lines[-1]["kind"] == "end"):
            faults.add("out_of_order")
            break
        else:
            lines.append(line)
    end = lines[-1] if lines and lines[-1]["kind"] == "end" else None
    if end is None:
        faults.add("early_exit")
    elif end.get("lines") != len(lines) - 1:
        faults.add("out_of_order")
    return TestReport(tuple(lines), end, frozenset(faults))


def _parsed(raw: bytes) -> Mapping[str, Any] | None:
    if len(raw) > LONGEST_LINE:
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("kind"), str) else None


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

    report: TestReport
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


def _flags(report: TestReport, result: CommandResult) -> dict[str, int]:
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


@dataclass(frozen=True)
class ValueResults:
    """How many hidden cases agree by value and exact type."""

    agreeing: int
    cases: int
    box: BoxReport

    @property
    def all_agree(self) -> bool:
        """Whether every case was answered once, and rightly."""
        return self.agreeing == self.cases and not self.box.report.faults


async def compare_values(
    sandbox: Sandbox,
    task: JudgedTask,
    tree: FileTree,
    changed: Sequence[str],
    limits: SandboxLimits,
) -> ValueResults:
    """Run all hidden cases of a task on a tree. Waits for a box; SandboxError where that fails."""
    calls = [
        {"target": one.target, "arguments": list(one.arguments), "keywords": dict(one.keywords)}
        for one in task.cases
    ]
    spec = {"imports": list(task.imports), "changed": list(changed), "calls": calls}
    box = await run_program(sandbox, tree, "call_functions", spec, limits)
    lines = box.report.of("value")
    answers = {line["place"]: line for line in lines if type(line.get("place")) is int}
    agreeing = sum(agrees(case, answers.get(place)) for place, case in enumerate(task.cases))
    return ValueResults(agreeing, len(task.cases), box)


def agrees(case: HiddenCase, answer: Any) -> bool:
    """Whether an answer from the box is what the original did."""
    if answer is None:
        return False
    try:
        return _agrees(case, answer)
    except RecursionError:
        return False  # nested deeper than any value that was recorded


def _agrees(case: HiddenCase, answer: Any) -> bool:
    if "raised" in case.expected:
        return same(case.expected["raised"], answer.get("raised"))
    if "returned" not in answer or not same(case.expected["returned"], answer["returned"]):
        return False
    after = case.arguments_after
    return after is None or same(list(after), answer.get("arguments"))


def _pairs(value: Any) -> list[Any] | None:
    """Return the items of an encoded dict by their keys; dicts are equal in any order."""
    items = value.get("dict") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(items, list) or not all(isinstance(one, list) for one in items):
        return None
    return sorted(items, key=lambda item: json.dumps(item[:1], sort_keys=True))


def same(expected: Any, found: Any) -> bool:
    """Whether two JSON values are equal in value and type: 1, 1.0 and true are three values.

    >>> same([1, {"a": 2.0}], [1, {"a": 2.0}]), same(1, True), same(1, 1.0)
    (True, False, False)
    """
    if type(expected) is not type(found):
        return False
    pairs = _pairs(expected), _pairs(found)
    if pairs[0] is not None and pairs[1] is not None:
        return same(*pairs)
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(
            same(expected[k], found[k]) for k in expected
        )
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, float):
        return expected.hex() == found.hex()
    return bool(expected == found)
