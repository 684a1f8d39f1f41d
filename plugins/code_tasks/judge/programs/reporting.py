"""How a program in a box reports: lines of JSON on a copy of its standard output.

What agent code prints goes nowhere. All functions that reporting needs are bound before any code of
the agent is imported, and the process ends without running what that code left to be run at exit.
"""

import json
import os
import sys
from typing import Any


class Reporter:
    """Writes numbered lines, each with the mark that the spec states."""

    def __init__(self, mark: str) -> None:
        self._write, self._exit = os.write, os._exit
        self._encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
        self._mark, self._number = mark, 0
        sys.stdout.flush()
        self._file = os.dup(1)
        os.set_inheritable(self._file, False)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)

    def say(self, kind: str, **facts: Any) -> None:
        """Write one line."""
        line = self._encode({"mark": self._mark, "number": self._number, "kind": kind, **facts})
        self._number += 1
        rest = line.encode("ascii") + b"\n"
        while rest:
            rest = rest[self._write(self._file, rest) :]

    def end(self, **facts: Any) -> None:
        """Write the last line and end the process at once."""
        self.say("end", lines=self._number, **facts)
        self._exit(0)


def in_tree(paths: list[str]) -> list[str]:
    """Return where files or folders of the tree are."""
    here = os.getcwd()  # noqa: PTH109
    return [os.path.normpath(os.path.join(here, one)) for one in paths]  # noqa: PTH118


def add_import_folders(folders: list[str]) -> None:
    """Let modules of the tree be imported, after all others: none hides a module of Python."""
    sys.path += in_tree(folders)
