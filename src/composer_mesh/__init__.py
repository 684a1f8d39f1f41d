"""Composer Mesh: a training service for agentic language models on Monarch.

`__init__.pyi` lists the public names (docs/python.md). Each is imported when it is first used, so
that reading a config never loads torch or Monarch. Everything else may change.
"""

import importlib
import os
from typing import Any

import lazy_loader

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_EXTRAS = {"trl": "trl"}
"""The extra that installs a package which a public name needs."""


def __getattr__(name: str) -> Any:
    """Import a public name; raise ImportError that names the extra whose package is missing."""
    try:
        found = (
            importlib.import_module(f"{__name__}.services.service")
            if name == "service"
            else _public(name)
        )
    except ModuleNotFoundError as missing:
        if (extra := _EXTRAS.get(missing.name or "")) is None:
            raise
        raise ImportError(
            f"composer_mesh.{name} needs the package {missing.name}, which is not installed: "
            f"pip install 'composer-mesh[{extra}]'"
        ) from missing
    globals()[name] = found
    return found
