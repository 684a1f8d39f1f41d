"""Earlier import paths of plugins: they work for one release, and warn."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "client": "plugins.tinker.client",
    "integrations.trl_environment": "plugins.openenv.trl_environment",
    "tasks.openenv": "plugins.openenv.client",
}
"""Modules and packages, below `composer_mesh`, and where each is now."""


def install() -> None:
    """Make earlier paths importable."""
    sys.meta_path.insert(0, _Moved())


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
        warnings.warn(
            f"{module.__name__} is {now} now, and its earlier path works in this release only",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = importlib.import_module(now)


def _now(name: str) -> str:
    """Return where a module is now; "" for one that was not moved."""
    root, _, below = name.partition(".")
    for old, new in MOVED.items() if root == "composer_mesh" else ():
        if below == old or below.startswith(f"{old}."):
            return f"{root}.{new}{below.removeprefix(old)}"
    return ""
