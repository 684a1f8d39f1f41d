"""The section `[environment.sandbox]`: where tasks run code that agents wrote."""

from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import FreeTable, Section


class SandboxConfig(Section):
    """A sandbox of each environment actor; used by tasks that need one."""

    kind: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Import path of a function that returns a sandbox, as "my_package.my_module:my_function";
    searched in run.import_paths too. None ships: without one, no task runs code of agents."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of the function."""
