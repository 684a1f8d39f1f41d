"""Programs that stand for ssh and for Python on another machine: small scripts on a PATH."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

SSH = """#!/bin/sh
# What ssh does: its last word is read by a shell on the other side.
{{ for word; do printf '%s\\n' "$word"; done; echo; }} >> {log}
[ -e {down} ] && {{ echo "ssh: connect to host: No route to host" >&2; exit 255; }}
for text; do :; done
exec sh -c "$text"
"""
PYTHON = """#!/bin/sh
# Says with which words and where it was called, and goes on until it is ended.
{{ pwd; for word; do printf '%s\\n' "$word"; done; echo; }} > {log}.$$
mv {log}.$$ {log}.called.$$
exec sleep 600
"""
PRINTS = """#!/bin/sh
{{ pwd; echo "$COMPOSER_MESH_REACHED"; for word; do printf '%s\\n' "$word"; done; }} > {log}
exit {status}
"""


@dataclass
class FakePrograms:
    """A folder of programs, and what they were called with."""

    folder: Path

    def ssh(self) -> None:
        self._write("ssh", SSH.format(log=self._quoted("ssh.log"), down=self._quoted("ssh.down")))

    def python(self) -> Path:
        return self._write("python far", PYTHON.format(log=self._quoted("python.log")))

    def prints(self, status: int = 0) -> Path:
        text = PRINTS.format(log=self._quoted("prints.log"), status=status)
        return self._write("python prints", text)

    def no_route(self) -> None:
        (self.folder / "ssh.down").touch()

    def said(self, name: str) -> list[list[str]]:
        """The calls of a program, each as its words."""
        log = self.folder / f"{name}.log"
        text = log.read_text() if log.exists() else ""
        return [call.split("\n") for call in text.split("\n\n") if call]

    def called(self) -> list[list[str]]:
        """The calls of the far Python so far: the folder, then the words."""
        files = self.folder.glob("python.log.called.*")
        return [file.read_text().rstrip("\n").split("\n") for file in files]

    def _quoted(self, name: str) -> str:
        return shlex.quote(str(self.folder / name))

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path


def fake_programs(folder: Path, patch: pytest.MonkeyPatch) -> FakePrograms:
    """Fake programs that come first on the PATH."""
    folder.mkdir()
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return FakePrograms(folder)
