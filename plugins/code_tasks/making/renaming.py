"""Renames the functions and classes of a package, so that a model cannot write them from memory.

Every word of every text file is renamed alike, strings and documentation too: what is looked up by
name is found by its new one. That the suite passes as before is tried afterwards.
"""

from __future__ import annotations

import abc
import ast
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
import string
import sys
import typing
import unittest
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from composer_mesh.plugins.code_tasks.making.package import Package

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
    for chosen in (names, [one for one in names if _has_words(one)]):
        yield Renaming(_new_names(package.tree, chosen, words))


def _parsed(package: Package) -> Iterator[tuple[str, ast.Module]]:
    for path in package.files:
        if path.endswith(".py"):
            try:
                yield path, ast.parse(package.files[path])
            except (SyntaxError, ValueError):
                continue


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
