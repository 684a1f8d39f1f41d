"""Makes all tasks of one package, in boxes.

Its functions and classes are renamed first, so that a model cannot write them from memory. Every
word of every text file is renamed alike, strings and documentation too: what is looked up by name
is found by its new one. That the suite passes as before is tried afterwards.
"""

from __future__ import annotations

import abc
import ast
import asyncio
import builtins
import collections
import functools
import hashlib
import io
import itertools
import json
import keyword
import operator
import os
import random
import re
import statistics
import string
import sys
import time
import typing
import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_mesh.plugins.code_tasks.judge.copies import copies_in_boxes
from composer_mesh.plugins.code_tasks.making.features import Features, chosen
from composer_mesh.plugins.code_tasks.making.functions import (
    FEWEST_LINES,
    BodyCounts,
    Function,
    functions_in,
)
from composer_mesh.plugins.code_tasks.making.hidden_cases import calls_of, cases_of
from composer_mesh.plugins.code_tasks.making.package import (
    MakingLimits,
    Package,
    PackageRefused,
    survey_of,
)
from composer_mesh.plugins.code_tasks.making.rows import Proof, proofs_of, task_row, tree_row
from composer_mesh.plugins.code_tasks.static_rules import parsed
from composer_mesh.tasks.sandbox import Sandbox

SHORTEST = 4
OF_PYTHON = (
    *(abc, ast, builtins, collections, functools, io, itertools, json, operator, os, os.path),
    *(random, re, string, sys, typing, unittest, unittest.TestCase, object, type, str, bytes, int),
    *(float, list, tuple, dict, set, BaseException, collections.OrderedDict, io.StringIO),
)
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
STARTS, ENDS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Renaming:
    """New names by the old ones."""

    names: Mapping[str, str]

    def of(self, package: Package) -> Package:
        """Return the package with new names in all of its text files."""
        if not self.names:
            return package
        words = re.compile(rf"\b({'|'.join(sorted(self.names, key=len, reverse=True))})\b")
        return replace(
            package, files={path: self._renamed(words, one) for path, one in package.files.items()}
        )

    def _renamed(self, words: re.Pattern[str], content: bytes) -> bytes:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return content
        return words.sub(lambda found: self.names[found[0]], text).encode()


def renamings(package: Package) -> Iterator[Renaming]:
    """Yield renamings of a package: of all its names, then of those that hardly mean anything else.

    The second one has names of several words only.
    """
    trees = dict(_parsed(package))
    words = {word for path in package.files for word in WORD.findall(_text(package, path))}
    defined = {one for one in _defined(package, trees) if len(one) >= SHORTEST}
    names = sorted(one for one in defined - _of_others(package, trees) if one[:2] != "__")
    for some in (names, [one for one in names if _has_words(one)]):
        yield Renaming(_new_names(package.tree, some, words))


def _parsed(package: Package) -> Iterator[tuple[str, ast.Module]]:
    for path in package.files:
        if path.endswith(".py") and (tree := parsed(package.files[path])) is not None:
            yield path, tree


def _defined(package: Package, trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield the names of functions and classes of the package's modules."""
    for path in package.source_files():
        for node in trees[path].body if path in trees else ():
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield node.name


def _of_others(package: Package, trees: Mapping[str, ast.Module]) -> set[str]:
    """Return names that also mean something else: Python's own, modules, and what is imported."""
    found = {*keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names}
    found |= {name for one in OF_PYTHON for name in dir(one)}
    found |= {part for path in package.files for part in re.split(r"[/.]", path)}
    found |= {package.name, package.name.replace("-", "_")}
    own = {one.partition(".")[0] for one in package.modules}
    for tree in trees.values():
        found |= set(_imported(tree, own))
    return found


def _imported(tree: ast.Module, own: Iterable[str]) -> Iterator[str]:
    """Yield what a module imports from others, and the attributes that it uses of these."""
    others = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for one in node.names for part in one.name.split("."))
            foreign = [one for one in node.names if one.name.partition(".")[0] not in own]
            others |= {one.asname or one.name.partition(".")[0] for one in foreign}
        elif isinstance(node, ast.ImportFrom) and not node.level and _root(node) not in own:
            yield from (one.name for one in node.names)
            others |= {one.asname or one.name for one in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in others:
                yield attribute


def _root(node: ast.ImportFrom) -> str:
    return (node.module or "").partition(".")[0]


def _has_words(name: str) -> bool:
    return "_" in name.strip("_") or bool(re.search(r"[a-z][A-Z]", name))


def _new_names(tree: str, names: Iterable[str], taken: set[str]) -> dict[str, str]:
    """Return a new name for each, the same one each time, with its underscores and capitals."""
    found: dict[str, str] = {}
    taken = set(taken)
    for name in names:
        count = 0
        while (new := _new_name(f"{tree}/{name}/{count}", name)) in taken:
            count += 1
        taken.add(new)
        found[name] = new
    return found


def _new_name(seed: str, name: str) -> str:
    digest = hashlib.sha256(seed.encode()).digest()
    letters = "".join(
        STARTS[one % len(STARTS)] + ENDS[one // len(STARTS) % len(ENDS)] for one in digest[:4]
    )
    plain = name.strip("_")
    capital = letters.capitalize() if plain[:1].isupper() else letters
    return name.replace(plain, capital)


def _text(package: Package, path: str) -> str:
    return package.files[path].decode("utf-8", "replace")


KEPT = 0.95
"""Share of the tests that pass under new names too."""

CHUNK = 100
"""Features that are tried in one box."""


@dataclass(frozen=True)
class Made:
    """The rows of a package, its tree first, and what the table says of it."""

    package: str
    version: str
    rows: list[dict[str, Any]]
    tests: int
    candidates: int
    refused: dict[str, int]
    seconds: float
    stable: int = 0
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def median_lines(self) -> float:
        """Median of the deleted lines of a task."""
        return statistics.median([one["lines"] for one in self.tasks] or [0])

    @property
    def median_failing(self) -> float:
        """Median of the tests that fail in a task."""
        return statistics.median([len(one["fail_to_pass"]) for one in self.tasks] or [0])

    @property
    def with_cases(self) -> int:
        """Tasks that have hidden cases."""
        return sum(bool(one["cases"]) for one in self.tasks)


async def made_of(
    sandbox: Sandbox,
    package: Package,
    limits: MakingLimits,
    limit: int | None = None,
    split: str | None = None,
) -> Made:
    """Make the tasks of a package. Waits for boxes.

    Raises PackageRefused where no tasks can be made of it, SandboxError where a box fails.
    """
    started = time.monotonic()
    if limits.rename:
        package = await _renamed(sandbox, package, limits)
    functions, makers = _functions(package)
    survey = await survey_of(sandbox, package, functions, makers, limits)
    copies = BodyCounts(package.files)
    single = {n: one for n, one in enumerate(functions) if not copies.has_copy(one)}
    copied = await copies_in_boxes(sandbox, (), [one.body for one in single.values()], FEWEST_LINES)
    usable = {
        number: one
        for number, one in single.items()
        if not (copied.place_of(one.body) or copied.library_place_of(one.body))
    }
    found = Features(usable, survey)
    features = [*chosen(found.all(), limit), *chosen(found.repairs(limits.bugs), limit)]
    calls = calls_of(usable, survey.inputs)
    cases, proofs = await asyncio.gather(
        cases_of(sandbox, package, calls, limits), _proofs(sandbox, package, features, limits)
    )
    refused: dict[str, int] = {}
    for proof in proofs:
        if proof.refused:
            refused[proof.refused] = refused.get(proof.refused, 0) + 1
    tasks = [task_row(package, one, cases, split) for one in proofs if not one.refused]
    return Made(
        package=package.name,
        version=package.version,
        rows=[tree_row(package), *tasks] if tasks else [],
        tests=survey.found,
        candidates=len(features),
        refused=refused,
        seconds=time.monotonic() - started,
        stable=len(survey.tests),
        tasks=tasks,
    )


async def _renamed(sandbox: Sandbox, package: Package, limits: MakingLimits) -> Package:
    """Return the package with other names, with which its suite passes as before. Waits for boxes.

    Raises PackageRefused where no renaming is like that.
    """
    before = len((await survey_of(sandbox, package, (), (), limits)).tests)
    passing = 0
    for renaming in renamings(package):
        other = renaming.of(package)
        try:
            passing = len((await survey_of(sandbox, other, (), (), limits)).tests)
        except PackageRefused:
            continue
        if renaming.names and passing >= KEPT * before:
            return other
    raise PackageRefused(
        f"with other names {passing} of its {before} tests pass, and {KEPT:.0%} have to"
    )


def _functions(package: Package) -> tuple[list[Function], list[tuple[str, int]]]:
    functions: list[Function] = []
    makers: list[tuple[str, int]] = []
    for path in package.source_files():
        module, content = package.module_of(path), package.files[path]
        found = functions_in(path, module, content, package.fewest_lines)
        functions += found.functions
        makers += [(path, line) for line in found.constructors]
    return functions, makers


async def _proofs(
    sandbox: Sandbox, package: Package, features: Sequence[Any], limits: MakingLimits
) -> list[Proof]:
    chunks = [features[place : place + CHUNK] for place in range(0, len(features), CHUNK)]
    found = await asyncio.gather(*(proofs_of(sandbox, package, one, limits) for one in chunks))
    return [proof for chunk in found for proof in chunk]
