"""Proves features in boxes: what is deleted is missed, what is restored is not.

For each, its tests run on the empty tree, on one of stubs, on the empty one again and on the
original, each in a fork of one process. All of them have passed three times before, in whole runs
of the suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import file_of
from composer_mesh.plugins.code_tasks.judge.tests_box import run_program
from composer_mesh.plugins.code_tasks.making.features import EMPTY, STUB, Feature
from composer_mesh.plugins.code_tasks.making.package import Package
from composer_mesh.plugins.code_tasks.making.survey import MakingLimits, has_conftest
from composer_mesh.tasks.sandbox import FileTree, Sandbox

EMPTY_RUN, STUB_RUN, AGAIN, ORIGINAL = "empty", "stub", "again", "original"


RUNS = (EMPTY_RUN, STUB_RUN, AGAIN, ORIGINAL)
"""The trees on which the tests of a feature run, in order."""


@dataclass(frozen=True)
class Proof:
    """Which tests a feature makes pass, and which pass anyway; or why it is no task."""

    feature: Feature
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    refused: str = ""


async def proofs_of(
    sandbox: Sandbox, package: Package, features: Sequence[Feature], limits: MakingLimits
) -> list[Proof]:
    """Try features of a package in one box. Waits for it; raises SandboxError where it fails.

    Features from the first on that the box did not get to have an empty proof that says so.
    """
    spec = {
        "imports": list(package.imports),
        "conftest": has_conftest(package.files),
        "files": sorted({file_of(test) for one in features for test in one.tests}),
        "modules": sorted({each.module for one in features for each in one.functions}),
        "limit_s": limits.trial_s,
        "cpu_s": limits.trial_cpu_s,
        "trials": [_trial(one) for one in features],
    }
    box_limits = limits.box(limits.suite_s + limits.trial_s * len(features))
    tree = FileTree(package.files)
    box = await run_program(sandbox, tree, "try_deletions", spec, box_limits)
    runs: list[dict[str, Mapping[str, Any]]] = [{} for _ in features]
    for line in box.report.of("trial"):
        runs[line["trial"]][line["variant"]] = line
    return [proof_of(feature, found) for feature, found in zip(features, runs, strict=True)]


def _trial(feature: Feature) -> dict[str, Any]:
    def edited(statement: str) -> list[list[Any]]:
        edits = zip(feature.deletions(statement), feature.functions, strict=True)
        return [[*edit, one.line] for edit, one in edits]

    empty, stub = edited(EMPTY), edited(STUB)
    return {
        "tests": list(feature.tests),
        "variants": [[EMPTY_RUN, empty], [STUB_RUN, stub], [AGAIN, empty], [ORIGINAL, []]],
    }


def proof_of(feature: Feature, runs: Mapping[str, Mapping[str, Any]]) -> Proof:
    """Return what the runs of a feature's tests prove."""
    for name in RUNS:
        run = runs.get(name)
        if run is None:
            return Proof(feature, refused=f"the {name} tree was not tried to the end")
        if run["broken"]:
            return Proof(feature, refused=f"the suite does not run on the {name} tree")
        if name != ORIGINAL and not run["failed"]:
            return Proof(feature, refused=f"no test fails on the {name} tree")
    good = set(runs[ORIGINAL]["passed"])
    missed = good.intersection(*(runs[one]["failed"] for one in RUNS[:3]))
    kept = good.intersection(*(runs[one]["passed"] for one in (EMPTY_RUN, AGAIN)))
    fail_to_pass = _named(feature, missed)
    if not fail_to_pass:
        return Proof(feature, refused="no test fails on the empty and the stub tree alike")
    return Proof(feature, fail_to_pass, _named(feature, kept))


def _named(feature: Feature, places: set[int]) -> tuple[str, ...]:
    return tuple(feature.tests[place] for place in sorted(places))
