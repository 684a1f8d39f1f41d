"""An image with a shell, small tools and Python, made of this machine's own programs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tiny_images import tiny_root

PROGRAMS = (
    *("awk", "bash", "basename", "cat", "chmod", "cksum", "cmp", "cp", "cut", "date", "dirname"),
    *("echo", "env", "find", "grep", "head", "id", "ln", "ls", "mkdir", "mkfifo", "mv", "nohup"),
    *("printf", "pwd", "readlink", "rm", "rmdir", "sed", "seq", "setsid", "sh", "sleep", "sort"),
    *("stat", "tac", "tail", "tee", "test", "touch", "tr", "true", "uniq", "wc", "xargs"),
)
LIBRARY = re.compile(r"(/\S+) \(0x")
LEFT_OUT = (
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "__pycache__", "config-*", "distutils", "*.a"),
)
NAME = "python:3.11-slim"
"""What the examples call the image that this one replaces."""


def python_root(folder: Path, programs: Sequence[Path] = ()) -> Path:
    """Fill a new folder for `rootfs:`; about 40 MB. It has the libraries of `programs` too."""
    tiny_root(folder, PROGRAMS)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = Path(sys.base_prefix) / "bin" / version
    for name in ("usr/bin", "app", "logs", "var/tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(program.resolve(), folder / "usr/bin/python3")
    (folder / "usr/bin/python3").chmod(0o755)
    library = folder / "usr/lib" / version
    standard = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    shutil.copytree(standard, library, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (library / "site-packages").mkdir()
    modules = [str(one) for one in (library / "lib-dynload").glob("*.so")]
    said = subprocess.run(
        ["ldd", str(program.resolve()), *modules, *map(str, programs)],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    for path in sorted(set(LIBRARY.findall(said))):
        place = folder / path.lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(path).resolve(), place)
            place.chmod(0o755)
    return folder


def with_image(tasks: Path, folder: Path, root: Path) -> Path:
    """Copy Harbor tasks to a folder, with an image on disk in place of `NAME`."""
    shutil.copytree(tasks, folder)
    for file in (*folder.rglob("task.toml"), *folder.rglob("Dockerfile")):
        file.write_text(file.read_text().replace(NAME, f"rootfs:{root}"))
    return folder
