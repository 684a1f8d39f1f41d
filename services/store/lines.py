"""JSON-lines files of a run directory, for people, tools and followers of a live run.

Files with rows in `run.sqlite` are copies that can be rebuilt; events are stored here only.
"""

import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.services.directory.file_checksums import FileChecksums


class Lines:
    """Append-only files of a folder, through no links below it. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, OpenFolder(root)
        self._files: dict[str, FileIO] = {}
        self._dirty: set[str] = set()
        self.checksums = FileChecksums(root)
        """Those of the files that are no copies of rows."""

    def add(self, name: str, line: bytes, *, copy: bool = False) -> None:
        """Append a line. Readers see it at once; `sync` puts it on disk.

        Lines that are no copies of rows get a checksum.
        """
        if name not in self._files:
            # Unbuffered, so that nothing is left to fail once more when the file is closed.
            self._files[name] = self._folder.append(name)
        left = memoryview(line + b"\n")
        while left:
            left = left[self._files[name].write(left) :]
        if not copy:
            self.checksums.appended(name, line + b"\n")
        self._dirty.add(name)

    def sync(self) -> None:
        """Flush all files to disk."""
        while self._dirty:
            os.fsync(self._files[self._dirty.pop()].fileno())

    def be(self, name: str, lines: Iterable[bytes]) -> None:
        """Rewrite a file atomically if its content differs from these lines."""
        content, path = b"".join(line + b"\n" for line in lines), self._root / name
        if (path.read_bytes() if path.exists() else b"") == content:
            return
        if name in self._files:
            self._files.pop(name).close()
            self._dirty.discard(name)
        self._folder.write_whole(name, content)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._folder.close()
