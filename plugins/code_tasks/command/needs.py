"""What packages and their tests import, resolved by pip from their metadata into one folder.

Only wheels are taken, so nothing is built; boxes alone run what is in the folder. Of what a
package's metadata names, the tests need its requirements, and those of an extra or a dependency
group for tests; where there is no such one, of one for development.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_module
from composer_mesh.plugins.code_tasks.command.sources import SourceDistribution

FOR_TESTS = re.compile(r"tests?|testing|unit-?tests?")
FOR_DEVELOPMENT = re.compile(r"dev|devel|develop|development")
TEST_FILE = re.compile(r"([^/]*test[^/]*requirements|requirements[-_/][^/]*test[^/]*)\.txt")
UNUSED = re.compile(
    r"pytest(-.+)?|coverage|build|twine|tox|pre-commit|mypy|ruff|black|isort|flake8|pylint|wheel"
    r"|pyupgrade|pycodestyle|validate-pyproject|hatch|invoke|furo|sphinx(-.+)?|mkdocs(-.+)?"
)
"""What tests are run, checked and published with. Boxes have pytest, and load no plugin of it."""

UNSTATED = {
    "funcy": ("whatever",),
    "jsonpatch": ("hypothesis",),
    "schedule": ("pytz",),
    "titlecase": ("regex",),
}
"""What tests of the built-in set import, and the metadata of their packages does not ask for."""

PIP_S = 900.0
PINS = "requirements.txt"


class NeedsUnresolved(Exception):
    """pip finds no set of wheels; the message is its own."""


@dataclass(frozen=True)
class Wheel:
    """A resolved distribution: its plain name, its version and the SHA-256 of its wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def needed_by(source: SourceDistribution) -> list[Requirement]:
    """Return what a package and its tests need here, by its metadata, without markers.

    A line that is no requirement of PEP 508 is left out.
    """
    always, by_extra = _stated(source.files)
    groups = _groups(source.files.get("pyproject.toml", b""))
    found = [*always, *UNSTATED.get(canonicalize_name(source.name), ())]
    for path, content in source.files.items():
        if TEST_FILE.fullmatch(path):
            found += content.decode("utf-8", "replace").splitlines()
    for pattern in (FOR_TESTS, FOR_DEVELOPMENT):
        extras = [one for one in by_extra if pattern.fullmatch(canonicalize_name(one))]
        named = [one for one in groups if pattern.fullmatch(canonicalize_name(one))]
        found += [text for extra in extras for text in by_extra[extra]]
        found += [text for group in named for text in _of_group(groups, group)]
        if extras or named:
            break
    needed = {str(one): one for one in map(_applying, found) if one is not None}
    return [one for one in needed.values() if not UNUSED.fullmatch(canonicalize_name(one.name))]


def _stated(files: Mapping[str, bytes]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements of a package, and those of each extra, with their other markers.

    They are in PKG-INFO, or in an older distribution's `requires.txt`, under headings.
    """
    about = HeaderParser().parsestr(files.get("PKG-INFO", b"").decode("utf-8", "replace"))
    always: list[str] = []
    by_extra: dict[str, list[str]] = {str(one): [] for one in about.get_all("Provides-Extra", [])}
    for text in map(str, about.get_all("Requires-Dist", [])):
        if _applying(text) is not None:
            always.append(text)
            continue
        for extra, those in by_extra.items():
            if (one := _applying(text, extra)) is not None:
                those.append(str(one))
    if always or any(by_extra.values()):
        return always, by_extra
    older = [content for path, content in files.items() if path.endswith(".egg-info/requires.txt")]
    where = always
    for line in (
        one for content in older for one in content.decode("utf-8", "replace").split("\n")
    ):
        if heading := re.fullmatch(r"\[([^:\]]*)(?::(.*))?\]", line.strip()):
            extra, marker = heading[1], heading[2]
            where = by_extra.setdefault(extra, []) if extra else always
            if marker and _applying(f"any; {marker}") is None:
                where = []
        else:
            where.append(line)
    return always, by_extra


def _applying(text: str, extra: str = "") -> Requirement | None:
    """Return a requirement that holds here, without its marker."""
    try:
        one = Requirement(text)
    except InvalidRequirement:
        return None
    if one.marker is not None and not one.marker.evaluate({"extra": extra}):
        return None
    one.marker = None
    return one


def _groups(pyproject: bytes) -> Mapping[str, Sequence[Any]]:
    try:
        found = tomllib.loads(pyproject.decode("utf-8", "replace")).get("dependency-groups", {})
    except tomllib.TOMLDecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: lines for name, lines in found.items() if isinstance(lines, list)}


def _of_group(
    groups: Mapping[str, Sequence[Any]], name: str, seen: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the requirements of a group and of those that it includes, each once (PEP 735)."""
    for line in groups.get(name, ()) if name not in seen else ():
        match line:
            case str():
                yield line
            case {"include-group": str(other)}:
                yield from _of_group(groups, other, seen | {name})


def resolved(
    requirements: Sequence[Requirement],
    pinned: Iterable[str],
    left_out: Collection[str],
    index_args: Sequence[str],
) -> list[Wheel]:
    """Return wheels for all requirements, and for all that these need, in one consistent set.

    `pinned` are versions that are fixed, as `NAME==VERSION`; the names in `left_out` are not among
    the result. Asks the index; raises NeedsUnresolved.
    """
    if not requirements:
        return []
    with TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "pinned.txt", Path(folder) / "report.json"
        constraints.write_text("".join(f"{one}\n" for one in pinned), encoding="utf-8")
        _pip(
            *("install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"),
            *("--quiet", "--report", str(report), "--constraint", str(constraints), *index_args),
            *map(str, requirements),
        )
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    wheels = [
        Wheel(
            canonicalize_name(one["metadata"]["name"]),
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in found
    ]
    return sorted((one for one in wheels if one.name not in left_out), key=str)


def resolved_together(
    needs: Mapping[str, Sequence[Requirement]],
    pinned: Sequence[str],
    left_out: Collection[str],
    index_args: Sequence[str],
    say: Callable[[str], None],
) -> list[Wheel]:
    """Return one consistent set of wheels for all packages, by the name of each.

    Where there is none, the packages are added one after another, and requirements that then do
    not fit are reported and left out: their tests will fail in boxes.
    """
    try:
        every = [one for these in needs.values() for one in these]
        return resolved(every, pinned, left_out, index_args)
    except NeedsUnresolved:
        pass
    wheels: list[Wheel] = []
    kept: list[Requirement] = []
    for package, these in needs.items():
        for some in dict.fromkeys((tuple(these), *((one,) for one in these))) if these else ():
            try:
                wheels = resolved([*kept, *some], pinned, left_out, index_args)
            except NeedsUnresolved as error:
                if len(some) == 1:
                    say(f"{package}: {some[0]} is left out: {error}; install it with --folder")
                continue
            kept += some
            if len(some) == len(these):
                break
    return wheels


def install(wheels: Sequence[Wheel], folder: Path, index_args: Sequence[str]) -> None:
    """Fill a folder with wheels, and with the file of their versions and hashes.

    It replaces what was there when all of it is complete. Raises NeedsUnresolved.
    """
    if folder.exists() and not (folder / PINS).is_file():
        raise NeedsUnresolved(
            f"{folder} is not a folder of ours: move it, or name another --output"
        )
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    pins = new / PINS
    pins.write_text("".join(f"{one}\n" for one in wheels), encoding="utf-8")
    try:
        _pip(
            *("install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"),
            *("--only-binary", ":all:", "--target", str(new), *index_args, "-r", str(pins)),
        )
    except NeedsUnresolved:
        shutil.rmtree(new)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)


def _pip(*arguments: str) -> None:
    command = python_module("pip", "--disable-pip-version-check", *arguments)
    try:
        done = programs.run(command, deadline_s=PIP_S, check=False)
    except programs.ProgramFailed as failed:
        raise NeedsUnresolved(str(failed)) from failed
    if done.status != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = (lines or done.stderr.strip().splitlines() or ["pip fails and says nothing"])[-1]
        raise NeedsUnresolved(said.removeprefix("ERROR: "))


def installed_versions(names: Iterable[str]) -> list[str]:
    """Return `NAME==VERSION` of distributions that are installed here."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in names]
