"""The rows that a file of coding tasks has for a package: its tree, then its tasks."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, file_of
from composer_mesh.plugins.code_tasks.making.package import Package
from composer_mesh.plugins.code_tasks.making.proof import Proof

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
    """Return what the agent is told."""
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
