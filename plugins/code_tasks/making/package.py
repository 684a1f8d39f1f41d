"""What a source distribution holds, and what its own suite says; and why one cannot be used.

It holds modules, tests and a license. The suite says which tests always pass, and which functions
they reach.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import is_test
from composer_mesh.plugins.code_tasks.judge.programs.bundle import ARGV
from composer_mesh.plugins.code_tasks.judge.tests_box import UNSEEDED, BoxReport, Start, run_program
from composer_mesh.plugins.code_tasks.making.functions import FEWEST_LINES, Function
from composer_mesh.plugins.code_tasks.task_file import LEAKS, PATH
from composer_mesh.tasks.sandbox import MIB, FileTree, Sandbox, SandboxLimits

LICENSE = re.compile(r"([^/]*/)?(LICEN[CS]E|COPYING|UNLICEN[CS]E|NOTICE)[^/]*", re.IGNORECASE)
METADATA = re.compile(r"([^/]*/)?[^/]+\.egg-info/PKG-INFO")
NATIVE = (".c", ".cc", ".cpp", ".pyx", ".pxd", ".rs", ".f90", ".cu")
TEST_FILE = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test|tests?)\.py")
LEFT_OUT = re.compile(
    r"(\.|(docs?|documentation|examples?|benchmarks?|bench|build|dist|node_modules|ci)/)|.*/\."
)
INSTRUCTIONS = re.compile(r"(.*/)?(AGENTS|CLAUDE|GEMINI|copilot-instructions)\.md", re.IGNORECASE)
"""Files that tell an agent what to do, which an agent of ours would read."""

NO_PACKAGE = frozenset(
    {
        *("tests", "test", "testing", "setup", "conftest", "noxfile", "tasks", "scripts", "tools"),
        *("fabfile", "ez_setup", "versioneer", "docs", "perf", "runtests", "manage", "dodo"),
    }
)
BASES = ("src/", "lib/", "")
LARGEST_FILE = 1_000_000
LARGEST_TREE = 16_000_000


class PackageRefused(Exception):
    """No tasks can be made of a package; the message says why in one line."""


@dataclass(frozen=True)
class Package:
    """The curated tree of a package. `sources` and `imports` are those of a task's row.

    Functions with fewer lines than `fewest_lines` are not deleted.
    """

    name: str
    version: str
    sha256: str
    license: str
    files: Mapping[str, bytes]
    sources: tuple[str, ...]
    imports: tuple[str, ...]
    test_files: tuple[str, ...]
    fewest_lines: int = FEWEST_LINES

    @property
    def tree(self) -> str:
        """Name of the package's tree in a file of tasks."""
        return f"{self.name}-{self.version}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Names under which the sources are imported."""
        return tuple(one.rpartition("/")[2].removesuffix(".py") for one in self.sources)

    def source_files(self) -> list[str]:
        """Return the package's own modules, without tests."""
        return [
            path
            for path in sorted(self.files)
            if path.endswith(".py")
            and not is_test(path)
            and any(path == one or path.startswith(f"{one}/") for one in self.sources)
        ]

    def module_of(self, path: str) -> str:
        """Return the name under which a file of the sources is imported."""
        base = self.imports[0]
        inner = path if base == "." else path.removeprefix(f"{base}/")
        return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(
    name: str, version: str, sha256: str, files: Mapping[str, bytes], in_boxes: Iterable[str] = ()
) -> Package:
    """Return the package of a source distribution's files; raises PackageRefused.

    `in_boxes` are the distributions that every box has: one of them cannot be a task.
    """
    if _plain(name) in {_plain(one) for one in in_boxes}:
        raise PackageRefused("pytest needs it, so every box has a copy of its code")
    license_ = _license(files)
    kept = _curated(files)
    native = [one for one in sorted(kept) if one.endswith(NATIVE) and not is_test(one)]
    if native:
        raise PackageRefused(f"it has extension modules ({native[0]}): only pure Python is built")
    sources, base = _sources(name, files, kept)
    kept |= _metadata(name, files, "" if base == "." else f"{base}/")
    tests = tuple(one for one in sorted(kept) if TEST_FILE.fullmatch(one) and one not in sources)
    if not tests:
        raise PackageRefused("its source distribution has no tests")
    if (size := sum(map(len, kept.values()))) > LARGEST_TREE:
        raise PackageRefused(f"its tree has {size:,} bytes, and a box takes {LARGEST_TREE:,}")
    return Package(name, version, sha256, license_, kept, sources, (base,), tests)


def _curated(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files that a task's tree may have."""
    return {
        path: content
        for path, content in sorted(files.items())
        if PATH.fullmatch(path)
        and len(path) < 300
        and len(content) <= LARGEST_FILE
        and not LEAKS.fullmatch(path)
        and not LEFT_OUT.match(path)
        and not INSTRUCTIONS.fullmatch(path)
    }


def _metadata(name: str, files: Mapping[str, bytes], base: str) -> dict[str, bytes]:
    """Return the metadata of a package where `importlib.metadata` finds it, next to its modules.

    Only some tools that build distributions put it there; a package may ask for its own version.
    """
    if "PKG-INFO" not in files or any(METADATA.fullmatch(path) for path in files):
        return {}
    return {f"{base}{_plain(name).replace('-', '_')}.egg-info/PKG-INFO": files["PKG-INFO"]}


def _license(files: Mapping[str, bytes]) -> str:
    """Return what is said of the license; raise PackageRefused where nothing is."""
    about = HeaderParser().parsestr(files.get("PKG-INFO", b"").decode("utf-8", "replace"))
    classifiers = [one for one in about.get_all("Classifier", []) if one.startswith("License ::")]
    stated = str(about.get("License-Expression") or about.get("License") or "").split("\n")[0]
    if classifiers and not stated:
        stated = classifiers[0].rpartition(" :: ")[2]
    if not stated and not any(LICENSE.fullmatch(path) for path in files):
        raise PackageRefused("it has no license, neither a file nor in PKG-INFO")
    return stated[:200] or "see the license file"


def _sources(
    name: str, files: Mapping[str, bytes], kept: Mapping[str, bytes]
) -> tuple[tuple[str, ...], str]:
    """Return the folders or modules of the package, and the folder that they are imported from."""
    said = [one for path in files if path.endswith("/top_level.txt") for one in _lines(files[path])]
    for base in BASES:
        tops = _tops(kept, base)
        wanted = [one for one in tops if one in said and one not in NO_PACKAGE]
        wanted = wanted or [one for one in tops if _plain(one) == _plain(name)]
        wanted = wanted or [one for one in tops if one not in NO_PACKAGE and one[0] != "_"]
        if wanted:
            found = tuple(f"{base}{tops[one]}" for one in wanted)
            return found, base.rstrip("/") or "."
    raise PackageRefused("no importable module is in its source distribution")


def _tops(kept: Mapping[str, bytes], base: str) -> dict[str, str]:
    """Return what is importable from a folder: names with the path of each."""
    found = {}
    for path in sorted(kept):
        inner = path.removeprefix(base)
        if not path.startswith(base):
            continue
        if inner.count("/") == 1 and inner.endswith("/__init__.py"):
            found[inner.split("/")[0]] = inner.split("/")[0]
        elif "/" not in inner and inner.endswith(".py") and not TEST_FILE.fullmatch(inner):
            found[inner.removesuffix(".py")] = inner
    return found


def _lines(content: bytes) -> list[str]:
    return content.decode("utf-8", "replace").split()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


RUNS = 3
SLOW_S = 1.0
"""Tests that take longer are no part of a task."""

LONGEST_ID = 300
SEEDED = Start(("python3", "-P", "-s", *ARGV[2:]), {"PYTHONHASHSEED": "0"})
"""Starts Python with a stated seed of hashes, so that what is recorded does not differ by run."""


@dataclass(frozen=True)
class MakingLimits:
    """Limits of boxes in which a package's own code runs.

    A trial of a deletion has `trial_cpu_s` on the processor: many loops never end without a body.
    Of the hidden cases of a function at most `generated` have inputs that no test has. Of each
    function so many `bugs` are tried; `rename` gives functions and classes other names.
    """

    suite_s: float = 240.0
    trial_s: float = 30.0
    trial_cpu_s: int = 5
    generated: int = 4
    bugs: int = 0
    rename: bool = False

    def box(self, wall_s: float) -> SandboxLimits:
        """Return the limits of a box that may take so long.

        They are the judge's own but for time and output: a test that needs more would fail there.
        """
        cpu_s = max(1, round(wall_s))
        return replace(SandboxLimits(), wall_s=wall_s, cpu_s=cpu_s, output_bytes=64 * MIB)


@dataclass(frozen=True)
class Survey:
    """`tests` passed in each run. `reached` are those of them that reach a function, by its number.

    `inputs` are arguments and keywords of recorded calls. `at_import` are functions that run when
    modules are imported. `found` counts all tests.
    """

    tests: tuple[str, ...]
    reached: Mapping[int, tuple[str, ...]]
    inputs: Mapping[int, Sequence[Any]]
    at_import: frozenset[int]
    found: int
    seconds: float


async def survey_of(
    sandbox: Sandbox,
    package: Package,
    functions: Sequence[Function],
    makers: Sequence[tuple[str, int]],
    limits: MakingLimits,
) -> Survey:
    """Run a package's suite three times, once under a profile hook. Waits for boxes.

    Raises PackageRefused where its tests cannot be used, SandboxError where a box fails.
    """
    first = await _run(sandbox, package, functions, makers, limits)
    passed = _passed(first)
    _refuse_unusable(first, passed)
    again = await asyncio.gather(*(_run(sandbox, package, (), (), limits) for _ in range(RUNS - 1)))
    for box in again:
        those = _passed(box)
        passed = [one for one in passed if one in set(those)]
    timings = {line["id"]: line for line in first.report.of("seconds")}
    slow = {one for one, line in timings.items() if line["seconds"] > SLOW_S or line["waits"]}
    tests = [one for one in passed if one not in slow and len(one) <= LONGEST_ID]
    if not tests:
        raise PackageRefused("none of its tests passes three times")
    spent = sum(box.result.seconds for box in (first, *again))
    return _survey(first, tests, spent)


def _survey(box: BoxReport, tests: Sequence[str], seconds: float) -> Survey:
    stable = set(tests)
    reached: dict[int, list[str]] = {}
    for line in box.report.of("reached"):
        for number in line["functions"] if line["id"] in stable else ():
            reached.setdefault(number, []).append(line["id"])
    at_import = box.report.end["at_import"] if box.report.end is not None else []
    return Survey(
        tests=tuple(tests),
        reached={number: tuple(those) for number, those in reached.items()},
        inputs={line["function"]: line["inputs"] for line in box.report.of("inputs")},
        at_import=frozenset(at_import),
        found=len(box.report.of("test")),
        seconds=seconds,
    )


async def _run(
    sandbox: Sandbox,
    package: Package,
    functions: Sequence[Function],
    makers: Sequence[tuple[str, int]],
    limits: MakingLimits,
) -> BoxReport:
    spec = {
        "imports": list(package.imports),
        "files": list(package.test_files),
        "conftest": has_conftest(package.files),
        "packages": list(package.modules),
        "functions": [[one.path, one.line, one.how] for one in functions],
        "makers": [list(one) for one in makers],
    }
    tree = FileTree(package.files)
    start = SEEDED if functions else UNSEEDED
    return await run_program(sandbox, tree, "survey_suite", spec, limits.box(limits.suite_s), start)


def has_conftest(files: Mapping[str, bytes]) -> bool:
    """Whether tests of a tree have a conftest file."""
    return any(path.rpartition("/")[2] == "conftest.py" for path in files)


def _passed(box: BoxReport) -> list[str]:
    return [line["id"] for line in box.report.of("test") if line.get("outcome") == "passed"]


def _refuse_unusable(box: BoxReport, passed: Sequence[str]) -> None:
    if box.report.end is None:
        limit = f"within {box.result.seconds:.0f} s" if box.result.ended == "wall_time" else ""
        raise PackageRefused(f"its suite does not end {limit or f'({box.result.ended})'}")
    if elsewhere := box.report.end.get("elsewhere"):
        raise PackageRefused(f"it is not imported from its source distribution: {elsewhere[0]}")
    if not passed:
        failed = box.report.of("collection") or box.report.of("test")
        lines = (
            str(failed[0].get("text", "")).strip().split("\n") if failed else ["none is collected"]
        )
        raise PackageRefused(f"none of its tests passes unmodified: {lines[-1].strip()[:160]}")
