"""A function of the user's, named in a config by its import path."""

from pydantic import Field

from composer_mesh.configs.base import FreeTable, ImportPath, Section


class CustomFunction(Section):
    """A user-defined function or class and its keyword arguments."""

    import_path: ImportPath
    """Import path, as my_module.my_function; searched in run.import_paths too."""

    kwargs: FreeTable = Field(default_factory=dict)
    """Its keyword arguments."""
