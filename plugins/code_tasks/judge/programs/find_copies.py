"""Looks in a box for what a task deleted: modules of the same name, and copies of bodies.

The spec is JSON on standard input: `mark`, `modules` (names that must not be importable here) and
`bodies` (by a digest of their first line: pairs of a number of lines and a digest of all). Copies
in the standard library are reported last, so that one elsewhere goes before them.
"""

import hashlib
import io
import json
import os
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec

from composer_mesh.plugins.code_tasks.judge.programs.reporting import Reporter

LARGEST = 16_000_000
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, MemoryError),
    *(tarfile.TarError, zipfile.BadZipFile),
)
"""What reading an archive raises where it is none, or asks for more than this box has."""
ARCHIVES = (".zip", ".whl", ".egg", ".pyz", ".tar", ".gz", ".tgz", ".bz2", ".xz")
MOST_FOUND = 1000


def squeezed(text: str) -> list[str]:
    """Return the lines of a text that are no remarks, whatever their indentation is."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and line[0] != "#"]


def digest(lines: list[str]) -> str:
    """Return what stands for squeezed lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "replace")).hexdigest()


def place_of(module: str) -> str | None:
    """Return the file that a name is imported from without the tree; None if it is from none."""
    spec = find_spec(module)
    return None if spec is None or spec.origin is None else spec.origin


def folders() -> list[tuple[str, bool]]:
    """Return the folders that modules are imported from; True for the standard library's."""
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    paths = [os.path.realpath(one) for one in sys.path if os.path.isdir(one)]  # noqa: PTH112
    found = {one: f"{one}/".startswith(f"{library}/") for one in paths}
    return sorted(found.items(), key=lambda one: one[1])


def texts_in(folder: str) -> Iterator[tuple[str, str]]:
    """Yield paths and texts of all files of a folder, and of those in archives."""
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            path = f"{place}/{name}"
            if name.endswith((".pyc", ".so")) or not _is_readable(path):
                continue
            with open(path, "rb") as file:  # noqa: PTH123
                content = file.read()
            members = _members(content) if name.endswith(ARCHIVES) else {"": content}
            for member, data in members.items():
                yield f"{path}{member}", data.decode("utf-8", "replace")


def _is_readable(path: str) -> bool:
    """Whether a path is a file that code in this box can read, and is not too large."""
    readable = os.path.isfile(path) and os.access(path, os.R_OK)  # noqa: PTH113
    return readable and os.path.getsize(path) <= LARGEST  # noqa: PTH202


def _members(content: bytes) -> dict[str, bytes]:
    """Return the files of an archive; none where it is no archive that can be read."""
    try:
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as zipped:
                return {f"!{one}": zipped.read(one) for one in zipped.namelist()}
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = ((one.name, archive.extractfile(one)) for one in archive.getmembers())
            return {f"!{name}": file.read() for name, file in files if file is not None}
    except UNREADABLE:
        return {}


def copies_in(text: str, bodies: dict[str, list[list[object]]]) -> Iterator[str]:
    """Yield the digests of bodies that stand in a text."""
    lines = squeezed(text)
    for place, line in enumerate(lines):
        for count, whole in bodies.get(digest([line]), ()):
            if digest(lines[place : place + int(str(count))]) == whole:
                yield str(whole)


def main() -> None:
    spec = json.load(sys.stdin)
    reporter = Reporter(spec["mark"])
    for module in spec["modules"]:
        if (place := place_of(module)) is not None:
            reporter.say("module", module=module, place=place)
    found: set[str] = set()
    for folder, library in folders():
        for path, text in texts_in(folder):
            for whole in copies_in(text, spec["bodies"]):
                if whole not in found and len(found) < MOST_FOUND:
                    found.add(whole)
                    reporter.say("copy", body=whole, place=path, library=library)
    reporter.end()


if __name__ == "__main__":
    main()
