"""Runs chosen tests with and without deletions, each time in a fork of one process.

Tests are collected once, on the original tree. A fork gives the deleted functions the code that the
edited file compiles to, and runs its tests; functions that run at import are not deleted this way.

The spec is JSON on standard input: `mark`, `imports`, `conftest`, `files` (of all tests), `limit_s`
and `cpu_s` (of a fork), `modules` (to be imported before), and `trials`: each with `tests` (ids),
and `variants`: pairs of a name and a list of deletions, each with the first line of its function.
After a variant in which no test fails, those after it are not run.
"""

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.deletions import Deletion, with_deletions
from composer_mesh.plugins.code_tasks.judge.programs.pytest_report import (
    ReportPlugin,
    pytest_arguments,
)
from composer_mesh.plugins.code_tasks.judge.programs.reporting import (
    Reporter,
    add_import_folders,
    in_tree,
)

Place = tuple[str, int]
BARE = ("--assert=plain", "--tb=no")
"""Nothing is said of why a test fails: only which ones do."""


class Outcomes:
    """Keeps what a run of tests tells."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}
        self.broken = 0

    def say(self, kind: str, **facts: Any) -> None:
        """Take one line."""
        if kind == "test":
            self.tests[facts["id"]] = facts["outcome"]
        else:
            self.broken += 1


class Trials:
    """Runs all trials in place of the collected tests."""

    def __init__(self, spec: dict[str, Any], reporter: Reporter, kept: Outcomes) -> None:
        self._spec, self._reporter, self._kept = spec, reporter, kept
        self._functions: dict[Place, list[FunctionType]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        """Run the trials; the tests that were collected are not run by themselves."""
        for name in self._spec["modules"]:
            try:
                importlib.import_module(name)
            except BaseException:  # noqa: BLE001  its functions are then not found
                continue
        self._functions = functions_by_place()
        gc.freeze()
        for number, trial in enumerate(self._spec["trials"]):
            for name, deletions in trial["variants"]:
                if not self._run(session, number, trial["tests"], name, deletions):
                    break
        return True

    def _run(
        self, session: Any, number: int, tests: list[str], name: str, deletions: list[list[Any]]
    ) -> bool:
        """Run one variant and report it; return whether the next one is wanted."""
        started = time.monotonic()
        items = [one for one in session.items if one.nodeid in set(tests)]
        outcome = in_a_fork(lambda: self._child(items, deletions), self._spec["limit_s"])
        outcome = outcome or {"tests": {}, "broken": -1}
        places = {test: place for place, test in enumerate(tests)}
        passed = [places[one] for one, how in outcome["tests"].items() if how == "passed"]
        failed = [places[one] for one, how in outcome["tests"].items() if how == "failed"]
        about = {"passed": sorted(passed), "failed": sorted(failed), "broken": outcome["broken"]}
        seconds = round(time.monotonic() - started, 3)
        self._reporter.say("trial", trial=number, variant=name, seconds=seconds, **about)
        return bool(failed) and not outcome["broken"]

    def _child(self, items: list[Any], deletions: list[list[Any]]) -> dict[str, Any]:
        """Delete, run the tests, and return how each ended."""
        used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        most = used + self._spec["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        self._kept.broken = 0
        if not replace_codes(self._functions, deletions):
            return {"tests": {}, "broken": -2}
        for place, item in enumerate(items):
            following = items[place + 1] if place + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return {"tests": self._kept.tests, "broken": self._kept.broken}


def functions_by_place() -> dict[Place, list[FunctionType]]:
    """Return all functions of the tree by their file and the first line of their code."""
    here = os.getcwd() + os.sep  # noqa: PTH109
    found: dict[Place, list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(here):
            place = (one.__code__.co_filename, one.__code__.co_firstlineno)
            found.setdefault(place, []).append(one)
    return found


def replace_codes(functions: dict[Place, list[FunctionType]], deletions: list[list[Any]]) -> bool:
    """Give functions the code that the edited files compile to; return whether each was found."""
    for path in sorted({one[0] for one in deletions}):
        those = [one for one in deletions if one[0] == path]
        file = in_tree([path])[0]
        edited = compiled(file, [Deletion(*one[:4]) for one in those])
        for line in (one[4] for one in those):
            code = edited.get(line)
            found = functions.get((file, line), [])
            if code is None or not found:
                return False
            for one in found:
                if one.__code__.co_name == code.co_name:
                    one.__code__ = code.replace(co_freevars=one.__code__.co_freevars)
    return True


def compiled(file: str, deletions: list[Deletion]) -> dict[int, CodeType]:
    """Return the codes of functions of an edited file by their first line, which is as before."""
    with open(file, encoding="utf-8", newline="") as source:  # noqa: PTH123
        text = source.read()
    padded = [
        one._replace(text=one.text + "\n" * (one.last - one.first + 1 - one.text.count("\n")))
        for one in deletions
    ]
    whole = compile(with_deletions(text, padded), file, "exec", dont_inherit=True)
    return {one.co_firstlineno: one for one in codes_in(whole)}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the codes of the functions and methods in a module's code; inner ones first."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes_in(one)
            if not one.co_name.startswith("<"):
                yield one


def in_a_fork(work: Any, limit_s: float) -> Any:
    """Return what a function returns in a fork; None where it does not within its time."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        tell_and_end(work, target)
    os.close(target)
    text = b""
    until = time.monotonic() + limit_s
    try:
        while (left := until - time.monotonic()) > 0:
            if not select.select([source], [], [], left)[0]:
                break
            piece = os.read(source, 1 << 16)
            if not piece:
                return json.loads(text) if text.endswith(b"}") else None
            text += piece
        return None
    finally:
        os.close(source)
        end(child)


def tell_and_end(work: Any, target: int) -> None:
    """Write what a function returns, and end this process; never returns."""
    leave, write_out, dumps = os._exit, os.write, json.dumps
    try:
        os.setsid()
        text = dumps(work()).encode()
        while text:
            text = text[write_out(target, text) :]
    finally:
        leave(0)


def end(child: int) -> None:
    """End a fork, and what it has started."""
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)


def main() -> None:
    spec = json.load(sys.stdin)
    reporter = Reporter(spec["mark"])
    add_import_folders(spec["imports"])
    kept = Outcomes()
    trials = Trials(spec, reporter, kept)
    pytest.main([*BARE, *pytest_arguments(spec)], plugins=[ReportPlugin(kept, None), trials])
    reporter.end()


if __name__ == "__main__":
    main()
