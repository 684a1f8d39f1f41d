"""Runs the tests on copies of the tree with one fault each, and prints which faults they catch.

    python tests/mutations/run.py core --at-least 27           # what `make mutations` runs
    python tests/mutations/run.py core --only NAME --tests tests/unit/losses
    python tests/mutations/run.py all -- -n 2                  # further arguments for pytest

A fault is caught by a test that fails with it and passes without it. The tests near the faulty
module run first: that changes when a fault is caught, not whether.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from edits import FOLDER, Mutation, UnusableEdit, mutations_of, placed, sets_of, sources

ROOT = FOLDER.parents[1]
TESTS = ("tests/unit", "tests/fuzz", "tests/procs", "tests/plugins")
OWN = "tests/unit/mutations"
"""The test that each fault can be applied, which fails wherever one has been."""
NEAR = 40
"""Test files that run first."""
FAILED = re.compile(
    r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\s\[]+(?:\[.*?\])?)?)(?: - .*)?$", re.MULTILINE
)
NO_TESTS = 5
"""Exit status of pytest that found no test."""


@dataclass
class Result:
    """How the tests met one fault; `by` is the test that caught it."""

    mutation: Mutation
    outcome: str
    by: str
    seconds: float


class Late(Exception):
    """The time of one fault is over."""


@dataclass
class Tree:
    """A copy of the tree in which tests run."""

    root: Path
    arguments: Sequence[str]
    broken: list[str] = field(default_factory=list)
    """Tests that fail without a fault too, and are left out."""

    def pytest(self, tests: Sequence[str], until: float) -> tuple[int, str]:
        """Run tests up to the first failure; return pytest's exit status and output."""
        command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-rfE", "--tb=no"]
        command += ["-p", "no:cacheprovider", f"--ignore={OWN}", *self.arguments]
        command += [f"--deselect={one}" for one in self.broken]
        paths = [str(self.root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        running = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = running.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Late from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        return running.returncode, said

    @contextmanager
    def with_fault(self, path: Path, changed: str) -> Iterator[None]:
        """Put a fault into the tree for a block."""
        before = (self.root / path).read_text()
        self._write(path, changed)
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """Write a module and drop what was compiled of it, which may look as new."""
        module = self.root / path
        module.write_text(text)
        for compiled in (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc"):
            compiled.unlink()


def copied(target: Path) -> None:
    """Copy the files of the tree that git does not ignore, links as links, as a repository."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):  # some tests list the files
        subprocess.run(command, cwd=target, check=True, capture_output=True)


def by_distance(tests: Sequence[Path], module: Path) -> list[Path]:
    """Return test files, those first whose path and imports are most like those of a module."""
    dotted = ".".join(("composer_mesh", *module.with_suffix("").parts))
    words = set(re.split(r"[/_.]", str(module.with_suffix(""))))

    def likeness(test: Path) -> int:
        own = set(re.split(r"[/_.]", str(test.relative_to(ROOT).with_suffix(""))))
        return len(words & own) + 5 * (dotted in test.read_text())

    return sorted(tests, key=lambda test: (-likeness(test), test))


def test_files(paths: Sequence[str]) -> list[Path]:
    """Return the test files below some paths."""
    found = (ROOT / path for path in paths)
    return [
        file
        for path in found
        for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))
    ]


def tried(
    mutation: Mutation, tree: Tree, files: Sequence[Path], options: argparse.Namespace
) -> Result:
    """Run the tests on one fault, up to the first that catches it."""
    began = time.monotonic()
    path, changed = placed(mutation, sources(ROOT))
    ordered = [str(file.relative_to(ROOT)) for file in by_distance(files, path)]
    rounds = [ordered[:NEAR]] if options.near else [ordered[:NEAR], ordered[NEAR:]]
    outcome, by = "survived", ""
    try:
        for tests in filter(None, rounds):
            if by := caught_by(tree, tests, path, changed, began + options.limit_s):
                outcome = "caught"
                break
    except Late:
        outcome = "late"
    return Result(mutation, outcome, by, time.monotonic() - began)


def caught_by(tree: Tree, tests: Sequence[str], path: Path, changed: str, until: float) -> str:
    """Return the test that a fault fails, and only the fault; "" where all pass."""
    while True:
        with tree.with_fault(path, changed):
            status, said = tree.pytest(tests, until)
        if status in (0, NO_TESTS):
            return ""
        failed = FAILED.findall(said)
        if not failed:
            raise SystemExit(
                f"pytest ended with status {status} and named no test:\n{said[-3000:]}"
            )
        status, _ = tree.pytest(failed[:1], until)
        if status == 0:
            return str(failed[0])
        if failed[0] in tree.broken:
            raise SystemExit(f"{failed[0]} fails without a fault, and cannot be left out: mend it")
        print(f"  {failed[0]} fails without the fault too: left out", flush=True)
        tree.broken.append(failed[0])


def main() -> int:
    """Print a line for each fault; return 1 where fewer are caught than wanted."""
    options, more = _parsed(sys.argv[1:])
    results = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copied(Path(folder))
        tree, files = Tree(Path(folder), more), test_files(options.tests)
        for one in options.wanted:
            results.append(result := tried(one, tree, files, options))
            print(f"{result.outcome:9}{result.seconds:7.0f} s  {one.name}  {result.by}", flush=True)
    caught = sum(one.outcome == "caught" for one in results)
    print(f"{caught} of {len(results)} faults are caught")
    for one in results:
        if one.outcome != "caught":
            print(f"  {one.outcome}: {one.mutation.name}: {one.mutation.what}")
    return int(caught < options.at_least)


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our options, with the faults that they name, and pytest's, which are behind `--`."""
    known = sets_of()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "sets",
        nargs="*",
        default=["core"],
        help=f"all, or some of {', '.join(known)} (default: core)",
    )
    parser.add_argument("--only", action="append", help="try this fault alone; may be repeated")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, help=f"run these tests (default: {' '.join(TESTS)})"
    )
    parser.add_argument("--near", action="store_true", help=f"run the {NEAR} nearest files alone")
    parser.add_argument(
        "--at-least", type=int, default=0, help="exit with 1 if fewer are caught (default: 0)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="bound the seconds of a fault (default: 3600)"
    )
    place = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:place])
    names = known if options.sets == ["all"] else options.sets
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no set of faults is named {unknown[0]}: use all, or {', '.join(known)}")
    every = {one.name: one for name in names for one in mutations_of(name)}
    if unknown := [name for name in options.only or () if name not in every]:
        parser.error(f"no fault of {', '.join(names)} is named {unknown[0]}")
    options.wanted = [every[name] for name in options.only or every]
    texts = sources(ROOT)
    try:
        for one in options.wanted:
            placed(one, texts)
    except UnusableEdit as error:
        parser.error(str(error))
    return options, list(arguments[place + 1 :])


if __name__ == "__main__":
    sys.exit(main())
