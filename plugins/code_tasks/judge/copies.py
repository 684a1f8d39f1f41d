"""Whether boxes hold what tasks deleted: installed, vendored, or in an archive."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask
from composer_mesh.plugins.code_tasks.judge.programs.find_copies import digest, squeezed
from composer_mesh.plugins.code_tasks.judge.tests_box import run_program
from composer_mesh.plugins.code_tasks.texts import decoded
from composer_mesh.tasks.sandbox import MIB, FileTree, Sandbox, SandboxError, SandboxLimits

FEWEST_LINES = 5
"""Lines of a body from which on a copy of it is no coincidence."""

LIMITS = SandboxLimits(wall_s=300.0, cpu_s=300, memory_bytes=2048 * MIB)


@dataclass(frozen=True)
class ModuleCopies:
    """Where modules are that a box imports without a tree, and where copies of bodies are.

    Those in the standard library, which each box has, are `library`.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    bodies: Mapping[str, str] = field(default_factory=dict)
    library: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, body: str) -> str | None:
        """Return where a copy of a body is, outside the standard library; None if there is none."""
        return self.bodies.get(digest(squeezed(body)))

    def library_place_of(self, body: str) -> str | None:
        """Return where a copy of a body is in the standard library; None if there is none."""
        return self.library.get(digest(squeezed(body)))


async def copies_in_boxes(
    sandbox: Sandbox,
    modules: Iterable[str],
    bodies: Iterable[str],
    fewest: int = FEWEST_LINES,
) -> ModuleCopies:
    """Return what a box has of modules and bodies; shorter bodies are not looked for.

    Waits for a box; raises SandboxError where that fails.
    """
    wanted: dict[str, list[list[object]]] = {}
    for lines in map(squeezed, bodies):
        if len(lines) >= fewest:
            wanted.setdefault(digest(lines[:1]), []).append([len(lines), digest(lines)])
    names = sorted(set(modules))
    spec = {"modules": names, "bodies": wanted}
    box = await run_program(sandbox, FileTree({}), "find_copies", spec, LIMITS)
    if box.report.faults:
        said = decoded(box.result.stderr)[-300:].strip()
        raise SandboxError(f"a box could not be looked through ({box.result.ended}): {said}")
    copies = box.report.of("copy")
    return ModuleCopies(
        {str(line["module"]): str(line["place"]) for line in box.report.of("module")},
        {str(line["body"]): str(line["place"]) for line in copies if not line["library"]},
        {str(line["body"]): str(line["place"]) for line in copies if line["library"]},
    )


def modules_of(task: JudgedTask) -> set[str]:
    """Return the names under which a task's package is imported.

    >>> modules_of(JudgedTask("a", {}, ("src/pack", "src/one.py"), (), (), imports=("src",)))
    {'one', 'pack'}
    """
    found = set()
    for source in task.sources:
        for base in task.imports:
            prefix = "" if base in {"", "."} else f"{base.rstrip('/')}/"
            if source.startswith(prefix):
                found.add(source.removeprefix(prefix).split("/")[0].removesuffix(".py"))
    return found


def deleted_texts(task: JudgedTask, solution: Mapping[str, str]) -> list[str]:
    """Return the texts that a solution has and a task lacks."""
    found: list[str] = []
    for path, text in solution.items():
        before = decoded(task.files.get(path, b"")).splitlines()
        after = text.splitlines()
        # Comparing is quadratic in repeated lines, so what both begin and end with is cut off.
        for _ in range(2):
            same = _same_beginning(before, after)
            before, after = before[same:][::-1], after[same:][::-1]
        changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        found += [
            "\n".join(after[first:end]) for kind, _, _, first, end in changes if kind != "equal"
        ]
    return found


def _same_beginning(one: list[str], other: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
