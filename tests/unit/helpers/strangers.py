"""An environment of its own, in which packages are installed that register names with ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT


@dataclass(frozen=True)
class Environment:
    """A virtual environment that imports what is installed here, and the package of `source`."""

    folder: Path
    source: Path = ROOT / "src"

    @classmethod
    def make(cls, folder: Path, source: Path = ROOT / "src") -> Environment:
        venv.create(folder, symlinks=True)
        made = cls(folder, source)
        seen_too = [str(source), sysconfig.get_path("purelib")]
        (made.packages / "seen_too.pth").write_text("\n".join(seen_too))
        return made

    @property
    def packages(self) -> Path:
        """Where its packages are installed."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `composer-mesh` in a folder."""
        command = [str(self.folder / "bin" / "python"), "-m", "composer_mesh", *words]
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )


def install(
    place: Path, name: str, files: Mapping[str, str], entry_points: Mapping[str, str]
) -> None:
    """Write a package's modules and metadata as pip does; `entry_points` are lines by group."""
    for file, text in files.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(text)
    about = place / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [f"[{group}]\n{lines}\n" for group, lines in entry_points.items()]
    (about / "entry_points.txt").write_text("\n".join(groups))
