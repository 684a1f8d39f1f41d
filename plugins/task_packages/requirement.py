"""Imports of the packages that tasks come from, with an error that says how to install them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from composer_mesh.tasks.errors import UnusableTask


@dataclass(frozen=True)
class Requirement:
    """A package of tasks: `task` needs its import package `module`, installed by `install`."""

    task: str
    distribution: str
    module: str
    versions: tuple[str, ...]
    install: str

    def imported(self, submodule: str = "") -> ModuleType:
        """Import the package, or one of its modules; raise UnusableTask if it is not there."""
        self._check_version()
        name = f"{self.module}.{submodule}" if submodule else self.module
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise UnusableTask(
                f"task {self.task!r} cannot import {name} ({error}): install what it needs with "
                f"{self.install}, or everything for tasks of packages with make tasks"
            ) from error

    def _check_version(self) -> None:
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            raise UnusableTask(
                f"task {self.task!r} needs the package {self.distribution}, which is not "
                f"installed: run {self.install}, or make tasks"
            ) from None
        if found not in self.versions:
            raise UnusableTask(
                f"task {self.task!r} was verified with {self.distribution} "
                f"{', '.join(self.versions)}, but {found} is installed: run {self.install}"
            )
