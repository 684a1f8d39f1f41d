"""The folder that a box sees as its root: an interpreter, its standard library, some programs.

Copied once for a process: only what is named here, no bytecode unless it is requested, no
installed packages but those that are requested, no copies of packages that others ship (`pip`,
`ensurepip`), no version control. So nothing has to be forbidden in a box that is not in it.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import py_compile
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from composer_mesh.mesh import programs
from composer_mesh.mesh.sandboxes.box_process import DEVICES
from composer_mesh.tasks.errors import UnusableTask

PROGRAMS = (
    *("sh", "cat", "cp", "cut", "diff", "dirname", "echo", "env", "false", "find", "grep", "head"),
    *("ls", "mkdir", "mv", "rm", "rmdir", "sed", "seq", "sleep", "sort", "tail", "touch", "tr"),
    *("true", "uniq", "wc", "xargs"),
)
LEFT_OUT = (
    *("*.opt-1.pyc", "*.opt-2.pyc", "*.pyo", "site-packages", "dist-packages", "ensurepip", "test"),
    *("tests", "idlelib", "turtledemo", "config-*", "_test*.so", "xxlimited*"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".git", ".hg", ".svn", "*.orig", "*.rej"),
    *("*.whl", "*.egg"),
)
BYTECODE = ("__pycache__", "*.pyc")
NOT_COPIED = (".pyc", ".whl", ".egg")
OWN_FILES = ("records.py", "runner.py")
OWN_PLACE = "usr/lib/composer-mesh/composer_mesh/mesh/sandboxes"
PACKAGES = "packages"
OF_EXTRA = {"pytest": "'composer-mesh[sandbox]'"}
"""What installs the package that boxes have by default."""
EMPTY = ("proc", "dev", "w", "tmp", "packages", "usr/bin", "usr/lib", "etc")
USERS = "agent:x:1000:1000:agent:/w:/bin/sh\n"
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def build_root(
    folder: Path,
    distributions: Sequence[str],
    folders: Sequence[Path],
    wanted: Sequence[str] = PROGRAMS,
    bytecode: bool = False,
) -> Path:
    """Fill a new folder with all that boxes see; return it. Takes about a second."""
    for name in EMPTY:
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{'bin' if name == 'bin' else 'lib'}")
    (folder / "usr/lib64").symlink_to("lib")
    _devices(folder / "dev")
    executables = [_python(folder, bytecode), *_programs(folder, wanted)]
    _own(folder)
    for name in with_dependencies(distributions):
        _distribution(folder / PACKAGES, name)
    if bytecode:
        _compiled(folder, PACKAGES)
    for one in folders:
        _copied_folder(one, folder / PACKAGES)
    _libraries(folder, executables)
    (folder / "etc/passwd").write_text(USERS)
    (folder / "etc/group").write_text("agent:x:1000:\n")
    _readable(folder)
    return folder


def _devices(folder: Path) -> None:
    """Make the places of devices: nsjail binds them there, bubblewrap covers the whole folder."""
    (folder / "shm").mkdir()
    (folder / "fd").symlink_to("/proc/self/fd")
    for path in DEVICES:
        (folder / Path(path).name).touch()


def _python(folder: Path, bytecode: bool) -> Path:
    """Copy the interpreter and its standard library; return the executable."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library, place = Path(sysconfig.get_path("stdlib")), folder / "usr/lib" / version
    ignored = shutil.ignore_patterns(*LEFT_OUT, *(() if bytecode else BYTECODE))
    shutil.copytree(library, place, ignore=ignored)
    binary = folder / "usr/bin" / version
    shutil.copyfile(Path(sys.executable).resolve(), binary)
    for name in ("python3", "python"):
        (folder / "usr/bin" / name).symlink_to(version)
    return binary


def _programs(folder: Path, names: Sequence[str]) -> list[Path]:
    found = []
    for name in names:
        if (source := shutil.which(name)) is not None:
            copied = folder / "usr/bin" / name
            shutil.copyfile(Path(source).resolve(), copied)
            found.append(copied)
    return found


def _libraries(folder: Path, executables: Sequence[Path]) -> None:
    """Copy the shared libraries that executables and extension modules load."""
    extensions = [*(folder / "usr/lib").rglob("*.so"), *(folder / PACKAGES).rglob("*.so")]
    for executable in executables:
        executable.chmod(0o755)
    # Next to the original: an interpreter may name its library relative to itself.
    original = Path(sys.executable).resolve()
    binaries = [original, *executables, *extensions]
    said = programs.run(["ldd", *map(str, binaries)], check=False).stdout
    for path in sorted(set(LIBRARY.findall(said))):
        if Path(path).is_relative_to(folder):
            continue  # a package brings it along, and its extensions find it there
        copied = folder / "usr/lib" / Path(path).name
        if not copied.exists():
            shutil.copyfile(Path(path).resolve(), copied)
            copied.chmod(0o755)


def _own(folder: Path) -> None:
    place = folder / OWN_PLACE
    place.mkdir(parents=True)
    for name in OWN_FILES:
        shutil.copyfile(Path(__file__).parent / name, place / name)


def with_dependencies(names: Sequence[str]) -> Iterable[str]:
    """Return distributions and all that they need here."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found[name] = None
            waiting += _required(name)
    return found


def _required(name: str) -> Iterator[str]:
    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise UnusableTask(
            f"boxes should have the package {name!r}, which is not installed here: pip install "
            f"{OF_EXTRA.get(name, name)}, or take it out of environment.sandbox.options.packages"
        ) from None
    for text in wanted:
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            yield one.name


def _distribution(place: Path, name: str) -> None:
    """Copy the files of an installed distribution, without bytecode and without wheels."""
    found = importlib.metadata.distribution(name)
    for file in found.files or []:
        parts = file.parts
        if ".." in parts or file.suffix in NOT_COPIED:
            continue
        source = Path(str(found.locate_file(file)))
        if source.is_file():
            target = place / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _compiled(root: Path, place: str) -> None:
    """Write the bytecode of a folder; a file that is no Python of this version has none."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # nobody can write there
    compileall.compile_dir(
        root / place, quiet=2, stripdir=root, prependdir="/", invalidation_mode=unchecked
    )


def _copied_folder(source: Path, place: Path) -> None:
    if not source.is_dir():
        raise UnusableTask(
            f"boxes should have the folder {source}, which is not a folder: name another"
        )
    names = (one for one in LEFT_OUT if one not in ("test", "tests"))
    ignored = shutil.ignore_patterns(*names, *BYTECODE)
    shutil.copytree(source, place, ignore=ignored, dirs_exist_ok=True)


def _readable(folder: Path) -> None:
    """Let each user read all of the folder, whatever this process's umask is."""
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            one = Path(path) / name
            if not one.is_symlink():
                one.chmod(0o755 if one.is_dir() or one.stat().st_mode & 0o100 else 0o644)
    folder.chmod(0o755)
