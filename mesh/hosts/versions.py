"""Installed versions that must be the same on all hosts, and how hosts differ.

Messages between processes are pickles of this package's classes, so a host with another Python,
torch, Monarch or composer-mesh would fail later, or silently compute something else.
"""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import composer_mesh

PACKAGES = ("torch", "torchmonarch", "composer-mesh")
SOURCES = "composer-mesh sources"


@cache
def versions() -> dict[str, str]:
    """Return name and version of each; this package's sources by their digest."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"Python": python} | {name: _version(name) for name in PACKAGES}
    return found | {SOURCES: _digest()}


def differences(host: str, here: dict[str, str], there: dict[str, str]) -> list[str]:
    """Describe each difference, as `gpu-1 has torch 2.12.0, the controller 2.13.0`."""
    return [
        f"{host} has {name} {there.get(name, 'of no version')}, the controller {mine}"
        for name, mine in here.items()
        if there.get(name) != mine
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _digest() -> str:
    package, found = Path(composer_mesh.__path__[0]), hashlib.sha256()
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(package)}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:12]
