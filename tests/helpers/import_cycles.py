"""No two modules of the package import each other, directly or through others: `make imports`.

Imports inside functions count. Circles that only imports under TYPE_CHECKING close cannot break a
program, and each of them is listed here. Imports by name (`importlib`) are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

import grimp

Circle = tuple[str, ...]

CLOSED_BY_TYPES: frozenset[Circle] = frozenset(
    {
        (
            "composer_mesh.plugins.code_tasks.task",
            "composer_mesh.plugins.code_tasks.work",
        ),
        ("composer_mesh.plugins.harbor.session", "composer_mesh.plugins.harbor.task"),
        (
            "composer_mesh.plugins.openenv.client.session",
            "composer_mesh.plugins.openenv.client.task",
        ),
    }
)
"""Circles of a task and its own session, whose attribute `task` has the task's class."""


def circles(package: str, types: bool) -> set[Circle]:
    """Sets of modules that reach each other by imports, sorted; `types` adds TYPE_CHECKING."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=not types, cache_dir=None)
    found = set()
    for module in graph.modules:
        mutual = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if mutual:
            found.add(tuple(sorted({module, *mutual})))
    return found


def faults(package: str, closed_by_types: Collection[Circle]) -> list[str]:
    """What is wrong with the circles of a package, one line each."""
    running = circles(package, types=False)
    typed = circles(package, types=True)
    unlisted = typed - running - set(closed_by_types)
    gone = set(closed_by_types) - typed
    return [
        *(f"import each other when they run: {', '.join(one)}" for one in sorted(running)),
        *(f"import each other for types: {', '.join(one)}" for one in sorted(unlisted)),
        *(f"listed, and no circle: {', '.join(one)}" for one in sorted(gone)),
    ]


def main() -> int:
    """Check the package; returns 1 with a line for each fault."""
    found = faults("composer_mesh", CLOSED_BY_TYPES)
    sys.stdout.writelines(f"{one}\n" for one in found)
    if found:
        sys.stdout.write(f"Move what both need into a module below, or see {Path(__file__).name}\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
