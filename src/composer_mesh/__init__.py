"""Composer Mesh: a training service for agentic language models on Monarch.

`__init__.pyi` lists the public names (docs/python.md). Each is imported when it is first used, so
that reading a config never loads torch or Monarch; without any, this needs Python alone, as the
processes of sandboxes have nothing else. Everything but the public names may change.
"""

import importlib
import os
from functools import cache
from typing import Any

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())

_EXTRAS = {"datasets": "datasets", "trl": "trl", "websockets": "openenv"}
"""The extra that installs a package which a public name needs; others are installed by name."""

_RENAMED: dict[str, str] = {}
"""Former public name to the present one, for one minor release (docs/python.md)."""


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name; a name without one is a module itself."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(f"{__file__}i").read_text(encoding="utf-8"))
    found = [one for one in stub.body if isinstance(one, ast.ImportFrom)]
    return {name.name: one.module or "" for one in found for name in one.names}


def __getattr__(name: str) -> Any:
    """Import a public name; raise ImportError that names the extra whose package is missing."""
    if name == "__all__":
        return sorted(_modules())
    if name in _RENAMED:
        import warnings

        text = f"composer_mesh.{name} is now composer_mesh.{_RENAMED[name]}: rename it, the next "
        warnings.warn(f"{text}minor release has no {name}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"{__name__}.{_modules()[name]}".removesuffix(".")
    try:
        module = None if path == __name__ else importlib.import_module(path)
        found = getattr(module, name, None) or importlib.import_module(f"{path}.{name}")
    except ModuleNotFoundError as missing:
        package = (missing.name or __name__).partition(".")[0]
        if package == __name__:
            raise
        install = f"'composer-mesh[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        raise ImportError(
            f"composer_mesh.{name} needs the package {package}, which is not installed: "
            f"pip install {install}"
        ) from missing
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
