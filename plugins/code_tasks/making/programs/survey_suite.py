"""Runs the whole suite of an original package in a box: which tests pass, and what they reach.

The spec is JSON on standard input: `mark`, `imports`, `files` (of tests), `conftest`, `packages`
(names that must be imported from the tree), and `functions`: for each its path, its first line and
how it is called ("function", "static", "class", "method", or "" where its inputs are not recorded).
With no functions nothing is profiled. `makers` are the places of constructors.
"""

import importlib
import json
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.judge.programs.pytest_report import (
    ReportPlugin,
    pytest_arguments,
)
from composer_mesh.plugins.code_tasks.judge.programs.reporting import (
    Reporter,
    add_import_folders,
    in_tree,
)
from composer_mesh.plugins.code_tasks.values import encode

MOST_INPUTS = 12
MOST_TRIES = 200
LONGEST_INPUT = 3000
UNKNOWN = -2
OTHERS = -1
VARIABLE, KEYWORDS = 0x04, 0x08


class CallRecorder:
    """Receives calls: notes which functions the current test reaches, and some of their inputs."""

    def __init__(self, functions: list[list[Any]], makers: list[list[Any]]) -> None:
        paths = {one: in_tree([one])[0] for one in {each[0] for each in functions + makers}}
        self._places = {(paths[path], line): n for n, (path, line, _) in enumerate(functions)}
        self._makers = {(paths[path], line) for path, line in makers}
        self._how = [how for _, _, how in functions]
        self._known: dict[int, int] = {}
        self._making: set[int] = set()
        self._starts: dict[int, int] = {}
        self._kept: list[CodeType] = []
        self._made: dict[int, Any] = {}
        self._tries = [0] * len(functions)
        self.inputs: list[dict[str, Any]] = [{} for _ in functions]
        self.reached: set[int] = set()

    def start(self) -> None:
        """Receive all calls of this thread and of those that it starts."""
        sys.setprofile(self.on_call)
        threading.setprofile(self.on_call)

    def on_call(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call of a function that is queried."""
        if event != "call":
            return
        code = frame.f_code
        number = self._known.get(id(code), UNKNOWN)
        if number == UNKNOWN:
            number = self._learned(code)
        if id(code) in self._making:
            self._note_made(frame, code)
        if number == OTHERS:
            return
        self.reached.add(number)
        if self._how[number] and self._tries[number] < MOST_TRIES:
            self._tries[number] += 1
            if len(self.inputs[number]) < MOST_INPUTS:
                self._note_inputs(number, frame, code)

    def _learned(self, code: CodeType) -> int:
        place = (code.co_filename, code.co_firstlineno)
        is_body = code.co_name not in {"<module>", "<lambda>"} and not code.co_name.startswith("<")
        number = self._places.get(place, OTHERS) if is_body else OTHERS
        self._known[id(code)] = number
        self._kept.append(code)
        if is_body and place in self._makers:
            self._making.add(id(code))
        return number

    def _note_made(self, frame: FrameType, code: CodeType) -> None:
        """Keep what an object is made of, so that it can be made again."""
        given = taken_by(frame, code)
        if not given[0]:
            return
        kind = type(given[0][0])
        target = f"{kind.__module__}:{kind.__qualname__}"
        try:
            made = [
                target,
                encode(given[0][1:])["list"],
                {k: encode(v) for k, v in given[1].items()},
            ]
        except (TypeError, RecursionError):
            self._made.pop(id(given[0][0]), None)
        else:
            self._made[id(given[0][0])] = made

    def _note_inputs(self, number: int, frame: FrameType, code: CodeType) -> None:
        if frame.f_lasti != self._starts.setdefault(id(code), frame.f_lasti):
            return  # a generator that continues
        how, (values, named) = self._how[number], taken_by(frame, code)
        first: list[Any] = []
        if how in {"method", "class"}:
            made = self._made.get(id(values[0])) if values and how == "method" else None
            if how == "method" and (made is None or made[0] != name_of(values[0])):
                return
            first, values = ([{"object": made}] if how == "method" else []), values[1:]
        try:
            arguments = [*first, *encode(values)["list"]]
            encoded = [arguments, {name: encode(one) for name, one in named.items()}]
        except (TypeError, RecursionError):
            return
        key = json.dumps(encoded)
        if len(key) <= LONGEST_INPUT:
            self.inputs[number].setdefault(key, encoded)


def name_of(value: Any) -> str:
    """Return the class of a value as a target."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def taken_by(frame: FrameType, code: CodeType) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the other arguments of a call that begins."""
    held = frame.f_locals
    count, names = code.co_argcount, code.co_varnames
    values = [held[name] for name in names[:count] if name in held]
    end = count + code.co_kwonlyargcount
    named = {name: held[name] for name in names[count:end] if name in held}
    if code.co_flags & VARIABLE:
        values += held.get(names[end], ())
        end += 1
    if code.co_flags & KEYWORDS:
        named |= held.get(names[end], {})
    return values, named


class SurveyPlugin:
    """Tells for each test which functions it reached, and how long it took."""

    def __init__(self, recorder: CallRecorder | None) -> None:
        self._recorder = recorder
        self.reached: dict[str, set[int]] = {}
        self.seconds: dict[str, float] = {}
        self.waiting: set[str] = set()
        self._now = ""

    def note_waits(self) -> None:
        """Note from now on which tests wait: how they end depends on the machine."""
        really_sleep = time.sleep

        def sleep(seconds: Any) -> None:
            self.waiting.add(self._now)
            really_sleep(seconds)

        time.sleep = sleep

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now = nodeid
        if self._recorder is not None:
            self._recorder.reached = self.reached.setdefault(nodeid, set())
            self._recorder.start()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        sys.setprofile(None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def elsewhere(packages: list[str]) -> list[str]:
    """Return where packages were imported from, of those that are not from the tree."""
    found = []
    here = os.getcwd() + os.sep  # noqa: PTH109
    for name in packages:
        file = getattr(sys.modules.get(name) or importlib.import_module(name), "__file__", None)
        if not str(file).startswith(here):
            found.append(f"{name}: {file}")
    return found


def main() -> None:
    spec = json.load(sys.stdin)
    reporter = Reporter(spec["mark"])
    add_import_folders(spec["imports"])
    recorder = CallRecorder(spec["functions"], spec["makers"]) if spec["functions"] else None
    plugin = SurveyPlugin(recorder)
    plugin.note_waits()
    early: set[int] = set()
    if recorder is not None:
        early = recorder.reached
        recorder.start()
    status = pytest.main(
        ["--assert=plain", *pytest_arguments(spec)], plugins=[ReportPlugin(reporter, None), plugin]
    )
    sys.setprofile(None)
    for test, functions in plugin.reached.items():
        reporter.say("reached", id=test, functions=sorted(functions))
    for number, inputs in enumerate(recorder.inputs if recorder is not None else []):
        if inputs:
            reporter.say("inputs", function=number, inputs=list(inputs.values()))
    for test, seconds in plugin.seconds.items():
        reporter.say("seconds", id=test, seconds=round(seconds, 3), waits=test in plugin.waiting)
    try:
        wrong = elsewhere(spec["packages"])
    except BaseException as error:  # noqa: BLE001  whatever the package raises is the answer
        wrong = [f"{type(error).__name__}: {error}"[:300]]
    at_import = sorted(early) if recorder is not None else []
    reporter.end(status=int(status), elsewhere=wrong, at_import=at_import)


if __name__ == "__main__":
    main()
