"""Earlier import paths of plugins: they work for one release, and warn."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "channels.harness": "plugins.frameworks.harness",
    "client": "plugins.tinker.client",
    "integrations.trl_environment": "plugins.openenv.trl_environment",
    "integrations": "plugins.frameworks",
    "tasks.openenv": "plugins.openenv.client",
}
"""Modules and packages, below `composer_mesh`, and where each is now; the first one counts."""

NAMES = {
    "VerifiersEnvironment": "plugins.frameworks.verifiers.workflow",
    "VerifiersTask": "plugins.frameworks.verifiers.workflow",
}
"""Names that `composer_mesh` had, and the module that has each now."""


def install() -> None:
    """Make earlier paths importable."""
    sys.meta_path.insert(0, _Moved())


def module_of(name: str) -> str | None:
    """Return the module of a name that `composer_mesh` had, with a warning; None for another."""
    if now := NAMES.get(name):
        _warn(f"composer_mesh.{name}", f"composer_mesh.{now}.{name}", calls=3)
    return now


def _warn(earlier: str, now: str, calls: int) -> None:
    """Warn where the earlier path is used: so many calls above, those of importlib not counted."""
    warnings.warn(
        f"{earlier} is {now} now, and its earlier path works in this release only",
        DeprecationWarning,
        stacklevel=calls + 1,
    )


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 as finders are called
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _now(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module itself in place of the earlier one: there is one of each class."""
        now = _now(module.__name__)
        _warn(module.__name__, now, calls=2)
        sys.modules[module.__name__] = importlib.import_module(now)


def _now(name: str) -> str:
    """Return where a module is now; "" for one that was not moved."""
    root, _, below = name.partition(".")
    for old, new in MOVED.items() if root == "composer_mesh" else ():
        if below == old or below.startswith(f"{old}."):
            return f"{root}.{new}{below.removeprefix(old)}"
    return ""
