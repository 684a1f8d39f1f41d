"""The section `[environment.sandbox]`: where tasks run code that agents wrote."""

from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import FreeTable, Section


class SandboxConfig(Section):
    """A sandbox of each environment actor; used by tasks that need one."""

    kind: Annotated[str, Field(min_length=1, max_length=1000)] = "bubblewrap"
    """`"bubblewrap"`, or the import path of a function that returns a sandbox, as
    "my_package.my_module:my_function"; searched in run.import_paths too."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of the function; those of bubblewrap are in docs/sandbox.md."""
