"""Writes a package with a task of the user's own, ready to run.

The files are those in `template`, where `$name` is replaced by the package's name.
"""

import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

TEMPLATE = files(__package__) / "template"
SUFFIX = ".template"
NAME = re.compile(r"[a-z](?:[a-z0-9_]*[a-z0-9])?")
LONGEST_NAME = 50
OWN_FOLDERS = ("tests", "runs", "build", "dist")
"""Folders that a project has next to its package."""


class NewTaskRefused(Exception):
    """The package cannot be written; the message says why."""


def new_task_command(name: str, folder: Path | None) -> int:
    """Write the package `name` and print how to continue; the exit status is 0."""
    place = folder or Path(name)
    write_package(name, place)
    shown = place if place.is_absolute() else f"./{place}"
    print(
        f"wrote {shown}: the task is in {name}/task.py\n"
        f"  cd {shown}\n"
        "  composer-mesh play config.toml --scripted expert\n"
        "  python -m unittest tests/test_task.py\n"
        "  composer-mesh check config.toml\n"
        "  composer-mesh train config.toml"
    )
    return 0


def write_package(name: str, place: Path) -> None:
    """Write the package into a new or empty folder; raises NewTaskRefused."""
    _refuse_name(name)
    _refuse_used(place)
    for path, source in template_files(TEMPLATE):
        target = place / path.replace("package/", f"{name}/", 1)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(Template(source).substitute(name=name), encoding="utf-8")
        except OSError as error:
            raise NewTaskRefused(
                f"{target} cannot be written ({error.strerror}): name another place with --output"
            ) from None


def template_files(folder: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each file of the template: its path in the project, and its text."""
    for one in folder.iterdir():
        if one.is_dir():
            yield from template_files(one, f"{above}{one.name}/")
        elif one.name.endswith(SUFFIX):
            yield above + one.name.removesuffix(SUFFIX), one.read_text(encoding="utf-8")


def _refuse_name(name: str) -> None:
    if NAME.fullmatch(name) is None or len(name) > LONGEST_NAME or keyword.iskeyword(name):
        raise NewTaskRefused(
            f"NAME is {name[:80]!r} but becomes that of a Python package: at most {LONGEST_NAME} "
            "lower-case letters, digits and underscores, with a letter first and no underscore "
            "last, and no keyword: write for example my_task"
        )
    if name in sys.stdlib_module_names:
        taken = "a module of Python's standard library"
    elif name in OWN_FOLDERS:
        taken = "another folder of the project"
    elif importlib.util.find_spec(name) is not None:
        taken = "a module that is installed here, or in the working directory"
    else:
        return
    raise NewTaskRefused(
        f"NAME is {name!r}, which is the name of {taken}: choose another, such as {name}_task"
    )


def _refuse_used(place: Path) -> None:
    try:
        used = place.is_symlink() or (
            place.exists() and (not place.is_dir() or any(place.iterdir()))
        )
    except OSError as error:
        raise NewTaskRefused(
            f"--output {place} cannot be read ({error.strerror}): name another place"
        ) from None
    if used:
        raise NewTaskRefused(
            f"{place} is there already but must be new or an empty folder: move it away, or name "
            "another place with --output"
        )
