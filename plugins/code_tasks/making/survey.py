"""What a package's own suite says: which tests always pass, and which functions they reach."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.plugins.code_tasks.judge.programs.bundle import ARGV
from composer_mesh.plugins.code_tasks.judge.tests_box import UNSEEDED, BoxReport, Start, run_program
from composer_mesh.plugins.code_tasks.making.functions import Function
from composer_mesh.plugins.code_tasks.making.package import Package, PackageRefused
from composer_mesh.tasks.sandbox import MIB, FileTree, Sandbox, SandboxLimits

RUNS = 3
SLOW_S = 1.0
"""Tests that take longer are no part of a task."""

LONGEST_ID = 300
SEEDED = Start(("python3", "-P", "-s", *ARGV[2:]), {"PYTHONHASHSEED": "0"})
"""Starts Python with a stated seed of hashes, so that what is recorded does not differ by run."""


@dataclass(frozen=True)
class MakingLimits:
    """Limits of boxes in which a package's own code runs.

    A trial of a deletion has `trial_cpu_s` on the processor: many loops never end without a body.
    Of the hidden cases of a function at most `generated` have inputs that no test has. Of each
    function so many `bugs` are tried; `rename` gives functions and classes other names.
    """

    suite_s: float = 240.0
    trial_s: float = 30.0
    trial_cpu_s: int = 5
    generated: int = 4
    bugs: int = 0
    rename: bool = False

    def box(self, wall_s: float) -> SandboxLimits:
        """Return the limits of a box that may take so long.

        They are the judge's own but for time and output: a test that needs more would fail there.
        """
        cpu_s = max(1, round(wall_s))
        return replace(SandboxLimits(), wall_s=wall_s, cpu_s=cpu_s, output_bytes=64 * MIB)


@dataclass(frozen=True)
class Survey:
    """`tests` passed in each run. `reached` are those of them that reach a function, by its number.

    `inputs` are arguments and keywords of recorded calls. `at_import` are functions that run when
    modules are imported. `found` counts all tests.
    """

    tests: tuple[str, ...]
    reached: Mapping[int, tuple[str, ...]]
    inputs: Mapping[int, Sequence[Any]]
    at_import: frozenset[int]
    found: int
    seconds: float


async def survey_of(
    sandbox: Sandbox,
    package: Package,
    functions: Sequence[Function],
    makers: Sequence[tuple[str, int]],
    limits: MakingLimits,
) -> Survey:
    """Run a package's suite three times, once under a profile hook. Waits for boxes.

    Raises PackageRefused where its tests cannot be used, SandboxError where a box fails.
    """
    first = await _run(sandbox, package, functions, makers, limits)
    passed = _passed(first)
    _refuse_unusable(first, passed)
    again = await asyncio.gather(*(_run(sandbox, package, (), (), limits) for _ in range(RUNS - 1)))
    for box in again:
        those = _passed(box)
        passed = [one for one in passed if one in set(those)]
    told = {line["id"]: line for line in first.report.of("seconds")}
    slow = {one for one, line in told.items() if line["seconds"] > SLOW_S or line["waits"]}
    tests = [one for one in passed if one not in slow and len(one) <= LONGEST_ID]
    if not tests:
        raise PackageRefused("none of its tests passes three times")
    spent = sum(box.result.seconds for box in (first, *again))
    return _survey(first, tests, spent)


def _survey(box: BoxReport, tests: Sequence[str], seconds: float) -> Survey:
    stable = set(tests)
    reached: dict[int, list[str]] = {}
    for line in box.report.of("reached"):
        for number in line["functions"] if line["id"] in stable else ():
            reached.setdefault(number, []).append(line["id"])
    at_import = box.report.end["at_import"] if box.report.end is not None else []
    return Survey(
        tests=tuple(tests),
        reached={number: tuple(those) for number, those in reached.items()},
        inputs={line["function"]: line["inputs"] for line in box.report.of("inputs")},
        at_import=frozenset(at_import),
        found=len(box.report.of("test")),
        seconds=seconds,
    )


async def _run(
    sandbox: Sandbox,
    package: Package,
    functions: Sequence[Function],
    makers: Sequence[tuple[str, int]],
    limits: MakingLimits,
) -> BoxReport:
    spec = {
        "imports": list(package.imports),
        "files": list(package.test_files),
        "conftest": has_conftest(package.files),
        "packages": list(package.modules),
        "functions": [[one.path, one.line, one.how] for one in functions],
        "makers": [list(one) for one in makers],
    }
    tree = FileTree(package.files)
    start = SEEDED if functions else UNSEEDED
    return await run_program(sandbox, tree, "survey_suite", spec, limits.box(limits.suite_s), start)


def has_conftest(files: Mapping[str, bytes]) -> bool:
    """Whether tests of a tree have a conftest file."""
    return any(path.rpartition("/")[2] == "conftest.py" for path in files)


def _passed(box: BoxReport) -> list[str]:
    return [line["id"] for line in box.report.of("test") if line.get("outcome") == "passed"]


def _refuse_unusable(box: BoxReport, passed: Sequence[str]) -> None:
    if box.report.end is None:
        limit = f"within {box.result.seconds:.0f} s" if box.result.ended == "wall_time" else ""
        raise PackageRefused(f"its suite does not end {limit or f'({box.result.ended})'}")
    if elsewhere := box.report.end.get("elsewhere"):
        raise PackageRefused(f"it is not imported from its source distribution: {elsewhere[0]}")
    if not passed:
        told = box.report.of("collection") or box.report.of("test")
        lines = str(told[0].get("text", "")).strip().split("\n") if told else ["none is collected"]
        raise PackageRefused(f"none of its tests passes unmodified: {lines[-1].strip()[:160]}")
