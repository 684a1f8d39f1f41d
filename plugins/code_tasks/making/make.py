"""Makes all tasks of one package, in boxes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.plugins.code_tasks.judge.copies import copies_in_boxes
from composer_mesh.plugins.code_tasks.making.features import Features, chosen
from composer_mesh.plugins.code_tasks.making.functions import (
    FEWEST_LINES,
    Copies,
    Function,
    functions_in,
)
from composer_mesh.plugins.code_tasks.making.hidden_cases import calls_of, cases_of
from composer_mesh.plugins.code_tasks.making.package import Package, PackageRefused
from composer_mesh.plugins.code_tasks.making.proof import Proof, proofs_of
from composer_mesh.plugins.code_tasks.making.renaming import renamings
from composer_mesh.plugins.code_tasks.making.rows import task_row, tree_row
from composer_mesh.plugins.code_tasks.making.survey import MakingLimits, survey_of
from composer_mesh.tasks.sandbox import Sandbox

KEPT = 0.95
"""Share of the tests that pass under new names too."""

CHUNK = 100
"""Features that are tried in one box."""


@dataclass(frozen=True)
class Made:
    """The rows of a package, its tree first, and what the table says of it."""

    package: str
    version: str
    rows: list[dict[str, Any]]
    tests: int
    candidates: int
    refused: dict[str, int]
    seconds: float
    stable: int = 0
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def median_lines(self) -> float:
        """Median of the deleted lines of a task."""
        return statistics.median([one["lines"] for one in self.tasks] or [0])

    @property
    def median_failing(self) -> float:
        """Median of the tests that fail in a task."""
        return statistics.median([len(one["fail_to_pass"]) for one in self.tasks] or [0])

    @property
    def with_cases(self) -> int:
        """Tasks that have hidden cases."""
        return sum(bool(one["cases"]) for one in self.tasks)


async def made_of(
    sandbox: Sandbox,
    package: Package,
    limits: MakingLimits,
    limit: int | None = None,
    split: str | None = None,
) -> Made:
    """Make the tasks of a package. Waits for boxes.

    Raises PackageRefused where no tasks can be made of it, SandboxError where a box fails.
    """
    started = time.monotonic()
    if limits.rename:
        package = await _renamed(sandbox, package, limits)
    functions, makers = _functions(package)
    survey = await survey_of(sandbox, package, functions, makers, limits)
    copies = Copies(package.files)
    single = {n: one for n, one in enumerate(functions) if not copies.has_copy(one)}
    copied = await copies_in_boxes(sandbox, (), [one.body for one in single.values()], FEWEST_LINES)
    usable = {
        number: one
        for number, one in single.items()
        if not (copied.place_of(one.body) or copied.library_place_of(one.body))
    }
    found = Features(usable, survey)
    features = [*chosen(found.all(), limit), *chosen(found.repairs(limits.bugs), limit)]
    calls = calls_of(usable, survey.inputs)
    cases, proofs = await asyncio.gather(
        cases_of(sandbox, package, calls, limits), _proofs(sandbox, package, features, limits)
    )
    refused: dict[str, int] = {}
    for proof in proofs:
        if proof.refused:
            refused[proof.refused] = refused.get(proof.refused, 0) + 1
    tasks = [task_row(package, one, cases, split) for one in proofs if not one.refused]
    return Made(
        package=package.name,
        version=package.version,
        rows=[tree_row(package), *tasks] if tasks else [],
        tests=survey.found,
        candidates=len(features),
        refused=refused,
        seconds=time.monotonic() - started,
        stable=len(survey.tests),
        tasks=tasks,
    )


async def _renamed(sandbox: Sandbox, package: Package, limits: MakingLimits) -> Package:
    """Return the package with other names, with which its suite passes as before. Waits for boxes.

    Raises PackageRefused where no renaming is like that.
    """
    before = len((await survey_of(sandbox, package, (), (), limits)).tests)
    passing = 0
    for renaming in renamings(package):
        other = renaming.of(package)
        try:
            passing = len((await survey_of(sandbox, other, (), (), limits)).tests)
        except PackageRefused:
            continue
        if renaming.names and passing >= KEPT * before:
            return other
    raise PackageRefused(
        f"with other names {passing} of its {before} tests pass, and {KEPT:.0%} have to"
    )


def _functions(package: Package) -> tuple[list[Function], list[tuple[str, int]]]:
    functions: list[Function] = []
    makers: list[tuple[str, int]] = []
    for path in package.source_files():
        module, content = package.module_of(path), package.files[path]
        found = functions_in(path, module, content, package.fewest_lines)
        functions += found.functions
        makers += [(path, line) for line in found.constructors]
    return functions, makers


async def _proofs(
    sandbox: Sandbox, package: Package, features: Sequence[Any], limits: MakingLimits
) -> list[Proof]:
    chunks = [features[place : place + CHUNK] for place in range(0, len(features), CHUNK)]
    found = await asyncio.gather(*(proofs_of(sandbox, package, one, limits) for one in chunks))
    return [proof for chunk in found for proof in chunk]
