"""The sandbox port: where tasks run code that agents wrote. Data and protocols only.

A session is a tree of files that advances; a box exists only while a command runs. Who runs a task
hands a `Sandbox` in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from composer_mesh.tasks.errors import TaskError

MIB = 1024 * 1024
LONGEST_PATH, LONGEST_NAME = 300, 255
"""Bytes of a path, and of each name in it."""
MOST_EDITS, LARGEST_EDITS = 10_000, 24 * MIB
"""What the edits of a session may be together, so that its tree always fits into a box."""
MOST_REPORTED = 100
UNUSABLE = re.compile(r"[\x00-\x1f\x7f]")

Ended = Literal["exited", "signal", "wall_time", "cpu_time", "memory"]


class SandboxError(TaskError):
    """A box failed through no fault of what ran in it: never a reward, never an observation."""

    failure_class = "infrastructure"


@dataclass(frozen=True)
class SandboxLimits:
    """What a command may use; the defaults suit a small run of Python tests.

    `file_bytes` bounds a single file, `disk_bytes` all that is written. Of standard output and
    standard error `output_bytes` each are kept.
    """

    wall_s: float = 60.0
    cpu_s: int = 60
    memory_bytes: int = 1024 * MIB
    processes: int = 32
    open_files: int = 256
    file_bytes: int = 16 * MIB
    disk_bytes: int = 64 * MIB
    output_bytes: int = 4 * MIB


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and the files of the work folder that it made, changed or removed.

    `exit_code` is None where a signal or a limit ended it. `refused_paths` are links, pipes, bad
    names and what was too large: none of them is taken over.
    """

    exit_code: int | None
    ended: Ended
    stdout: bytes
    stderr: bytes
    output_cut: bool
    seconds: float
    changed: Mapping[str, bytes | None]
    refused_paths: tuple[str, ...]


@dataclass(frozen=True)
class FileTree:
    """An immutable tree: a base that many sessions share, and edits of one; None is removed."""

    base: Mapping[str, bytes]
    edits: Mapping[str, bytes | None] = field(default_factory=dict)

    def read(self, path: str) -> bytes:
        """Return the bytes of a file; raise FileNotFoundError where there is none."""
        content = self.edits[path] if path in self.edits else self.base.get(path)
        if content is None:
            raise FileNotFoundError(f"there is no file {path[:LONGEST_PATH]!r}")
        return content

    def files(self) -> list[str]:
        """Return all paths in order."""
        removed = {path for path, content in self.edits.items() if content is None}
        return sorted((self.base.keys() | self.edits.keys()) - removed)

    def with_edit(self, path: str, content: bytes | None) -> FileTree:
        """Return the tree with one more edit; raise ValueError for a path that is no path."""
        return self.with_edits({path: content})

    def with_edits(self, edits: Mapping[str, bytes | None]) -> FileTree:
        """Return the tree with more edits.

        Raises ValueError for a path that is no path, or is that of a folder or below a file; and
        where the edits become more than any box takes.
        """
        for path in edits:
            check_path(path)
        edited = replace(self, edits={**self.edits, **edits})
        if clashes := edited.clashes():
            raise ValueError(
                f"{min(clashes)[:LONGEST_PATH]!r} would be a file and a folder: remove the file or "
                "write another path"
            )
        if not edited.fits():
            raise ValueError(
                f"the edits of a session may be {MOST_EDITS:,} files and {LARGEST_EDITS:,} bytes "
                "together: write less"
            )
        return edited

    def with_changes(self, changes: Mapping[str, bytes | None]) -> tuple[FileTree, list[str]]:
        """Return the tree with what a command changed, and the paths that were not taken over.

        Code in a box can report what no folder can hold; the smallest files are taken first.
        """
        clashes = replace(self, edits={**self.edits, **changes}).clashes()
        taken = {
            path: content
            for path, content in sorted(changes.items(), key=lambda one: len(one[1] or b""))
            if not clashes & {path, *folders_of(path)}
        }
        edited = replace(self, edits={**self.edits, **taken})
        while taken and not edited.fits():
            for path in list(taken)[len(taken) // 2 :]:
                del taken[path]
            edited = replace(self, edits={**self.edits, **taken})
        return edited, sorted(changes.keys() - taken.keys())

    def clashes(self) -> set[str]:
        """Return the paths that are both a file and a folder."""
        files = self.files()
        return {folder for path in files for folder in folders_of(path)}.intersection(files)

    def fits(self) -> bool:
        """Whether the edits are no more than boxes take."""
        size = sum(len(content or b"") for content in self.edits.values())
        return len(self.edits) <= MOST_EDITS and size <= LARGEST_EDITS


class Sandbox(Protocol):
    """Runs commands in boxes; one of a process, with a bounded number of boxes at once."""

    async def run(
        self,
        tree: FileTree,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits = SandboxLimits(),
        environment: Mapping[str, str] = {},
    ) -> CommandResult:
        """Run a command on a tree. Waits for a box; raises SandboxError where that fails."""

    async def close(self) -> None:
        """End all boxes."""


@runtime_checkable
class DescribedSandbox(Protocol):
    """A sandbox that says what it keeps in; `check` prints it."""

    def describe(self) -> Iterator[str]:
        """Yield lines."""


class SandboxSession:
    """A tree that commands and edits advance; it holds no process."""

    def __init__(self, sandbox: Sandbox, tree: FileTree) -> None:
        self._sandbox, self.tree = sandbox, tree

    def read(self, path: str) -> bytes:
        """Return the bytes of a file; raise FileNotFoundError where there is none."""
        return self.tree.read(path)

    def write(self, path: str, content: bytes) -> None:
        """Write a file; raise ValueError for a path that is no path."""
        self.tree = self.tree.with_edit(path, content)

    def remove(self, path: str) -> None:
        """Remove a file; raise FileNotFoundError where there is none."""
        self.tree.read(path)
        self.tree = self.tree.with_edit(path, None)

    def list(self) -> list[str]:
        """Return all paths in order."""
        return self.tree.files()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits = SandboxLimits(),
        keep_changes: bool = True,
    ) -> CommandResult:
        """Run a command on the tree and take over what it changed. Waits for a box."""
        result = await self._sandbox.run(self.tree, argv, stdin=stdin, limits=limits)
        if not keep_changes:
            return result
        self.tree, left_out = self.tree.with_changes(result.changed)
        if not left_out:
            return result
        taken = {path: one for path, one in result.changed.items() if path not in set(left_out)}
        refused = (*result.refused_paths, *left_out[:MOST_REPORTED])
        return replace(result, changed=taken, refused_paths=refused)

    async def close(self) -> None:
        """Nothing is held between commands."""


def folders_of(path: str) -> list[str]:
    """Return the folders that a path lies in.

    >>> folders_of("a/b/c.py")
    ['a', 'a/b']
    """
    return [path[:place] for place, sign in enumerate(path) if sign == "/"]


def check_path(path: str) -> None:
    """Raise ValueError for a path that is absolute, leaves its tree, or that no file can have.

    >>> check_path("a/../b")
    Traceback (most recent call last):
    ...
    ValueError: 'a/../b' is no path below the root of the tree: write one such as "folder/file.py"
    """
    parts = path.split("/")
    try:
        size, longest = len(path.encode()), max(len(one.encode()) for one in parts)
    except UnicodeEncodeError:
        size, longest = LONGEST_PATH + 1, 0
    if (
        not 0 < size <= LONGEST_PATH
        or longest > LONGEST_NAME
        or {"", ".", ".."} & set(parts)
        or UNUSABLE.search(path)
    ):
        raise ValueError(
            f"{path[:LONGEST_PATH]!r} is no path below the root of the tree: write one such as "
            '"folder/file.py"'
        )
