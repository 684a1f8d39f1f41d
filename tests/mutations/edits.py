"""The faults of this folder's TOML files, and how they are put into the source.

A fault is found by its text, in all sources of the package, so it moves with the code. One whose
text is not there exactly once is an error: adapt it to the code, or replace it by another fault.
"""

import ast
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
FIELDS = ("name", "what", "find", "replace")


class UnusableEdit(ValueError):
    """A fault that cannot be put into the source."""


@dataclass(frozen=True)
class Mutation:
    """A fault: its name and what a user would lose, and the text that it replaces."""

    name: str
    what: str
    find: str
    replace: str


def sets_of(folder: Path = FOLDER) -> list[str]:
    """Return the names of the sets of faults, the core's first."""
    names = sorted(path.stem for path in folder.glob("*.toml"))
    return sorted(names, key=lambda name: name != "core")


def mutations_of(name: str, folder: Path = FOLDER) -> list[Mutation]:
    """Return the faults of a set; raises UnusableEdit for one without all fields."""
    table = tomllib.loads((folder / f"{name}.toml").read_text())
    found = table["mutation"]
    for place, one in enumerate(found, start=1):
        if sorted(one) != sorted(FIELDS):
            raise UnusableEdit(f"mutation {place} of {name}.toml must have the fields {FIELDS}")
    return [Mutation(**one) for one in found]


def sources(root: Path) -> dict[Path, str]:
    """Return the text of each module of the package, by its path from the root of the tree."""
    links = sorted((root / "src" / "composer_mesh").iterdir())
    folders = [link.resolve() for link in links if link.is_dir() and link.name != "__pycache__"]
    modules = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {path.relative_to(root.resolve()): path.read_text() for path in modules}


def placed(mutation: Mutation, texts: Mapping[Path, str]) -> tuple[Path, str]:
    """Return the module that a fault is in, and its text with the fault.

    Raises UnusableEdit where the text is not there exactly once, or the result is no Python.
    """
    find, replace = _lines(mutation.find), _lines(mutation.replace)
    places = {path: text.count(find) for path, text in texts.items() if find in text}
    if sum(places.values()) != 1:
        where = ", ".join(map(str, places)) or "no module"
        raise UnusableEdit(
            f"the text of {mutation.name} is {sum(places.values())} times in the package "
            f"({where}): adapt it to the code, or write another fault"
        )
    (path,) = places
    changed = texts[path].replace(find, replace)
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(texts[path]))
    except SyntaxError as error:
        raise UnusableEdit(f"{path} is not Python with {mutation.name}: {error}") from None
    if same:
        raise UnusableEdit(f"{mutation.name} changes nothing in {path} but its layout")
    return path, changed


def _lines(text: str) -> str:
    """Return a text of whole lines without the first line break, which only the TOML needs."""
    return text.removeprefix("\n")
