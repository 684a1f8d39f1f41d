"""The rows that a file of coding tasks has for a package: its tree, then its tasks.

Each feature is proved in boxes: what is deleted is missed, what is restored is not. Its tests run
on the empty tree, on one of stubs, on the empty one again and on the original, each in a fork of
one process. All of them have passed three times before, in whole runs of the suite.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, file_of
from composer_mesh.plugins.code_tasks.judge.tests_box import run_program
from composer_mesh.plugins.code_tasks.making.features import EMPTY, STUB, Feature
from composer_mesh.plugins.code_tasks.making.package import MakingLimits, Package, has_conftest
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


MOST_CASES = 40
MOST_NAMED = 12
WHAT = {
    "function": "The body of a function is deleted",
    "class": "The methods of a class are deleted",
    "group": "The functions of a feature are deleted",
    "files": "The functions of a feature are deleted, in more than one file",
}

Row = dict[str, Any]


def tree_row(package: Package) -> Row:
    """Return the row of a package's original files."""
    return {
        "tree": package.tree,
        "package": package.name,
        "version": package.version,
        "sha256": package.sha256,
        "license": package.license,
        "files": {path: _content(one) for path, one in sorted(package.files.items())},
    }


def task_row(
    package: Package, proof: Proof, cases: Mapping[str, Sequence[HiddenCase]], split: str | None
) -> Row:
    """Return the row of a proved feature."""
    feature = proof.feature
    targets = sorted({one.target for one in feature.functions})
    each = max(1, MOST_CASES // len(targets))
    hidden = [case for target in targets for case in cases.get(target, ())[:each]]
    row: Row = {
        "name": f"{package.tree}/{feature.name}",
        "package": package.name,
        "kind": feature.kind,
        "lines": feature.lines,
        "prompt": prompt_of(package, proof),
        "tree": package.tree,
        "deletions": [one._asdict() for one in feature.deletions()],
        "sources": list(package.sources),
        "imports": list(package.imports),
        "targets": targets,
        "fail_to_pass": list(proof.fail_to_pass),
        "pass_to_pass": list(proof.pass_to_pass),
        "cases": [_case(one) for one in hidden],
    }
    return row if split is None else {**row, "split": split}


def prompt_of(package: Package, proof: Proof) -> str:
    """Return what the agent is given."""
    feature = proof.feature
    named = [f"- `{one.qualname}` in {one.path}" for one in feature.functions[:MOST_NAMED]]
    if len(feature.functions) == 1:  # a property and its setter share a name
        named = [f"{named[0]}, line {feature.functions[0].line}"]
    files = sorted({file_of(one) for one in proof.fail_to_pass})
    failing = (
        f"Tests that fail now are in {', '.join(files)} "
        f"({len(proof.fail_to_pass)} of those that are checked)."
    )
    if feature.kind == "repair":
        return "\n".join(
            [
                f"This repository is the Python package {package.name}. {feature.functions[0].path}"
                " has a bug: one operator, number or constant of a function is wrong.",
                "",
                "Find it and mend it. Change no test. Some calls that no test shows are checked "
                "too.",
                failing,
                f"[{package.tree}/{_digest(feature.name)}]",
            ]
        )
    return "\n".join(
        [
            f"This repository is the Python package {package.name}. {WHAT[feature.kind]}: each now "
            "raises NotImplementedError.",
            "",
            *named,
            "",
            "Write what is missing, so that it does what its signature, its docstring, its callers "
            "and the tests say. Change no test. Some calls that no test shows are checked too.",
            failing,
            f"[{package.tree}/{feature.name}]",
        ]
    )


def _digest(name: str) -> str:
    """Return what tells prompts of repairs apart without telling where the bug is."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _case(case: HiddenCase) -> Row:
    row: Row = {
        "target": case.target,
        "arguments": list(case.arguments),
        "keywords": dict(case.keywords),
        "expected": dict(case.expected),
    }
    if case.arguments_after is not None:
        row["arguments_after"] = list(case.arguments_after)
    return row


def _content(content: bytes) -> str | dict[str, str]:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode("ascii")}
