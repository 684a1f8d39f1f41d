"""Errors of the user's own functions, and the line of theirs that an error names.

A frame is two lines of text, as in `my_loss.py:12, in my_loss` and the source of that line. It is
found where the function was called and crosses processes with its error. An error with a frame
states by `failure_class` what `mesh.failures` needs: no process is restarted for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1]
LIBRARY = sysconfig.get_path("stdlib")
IN = ", in "
LONGEST_SOURCE = 200
DEFINITIONS = ("def ", "async def ")
MOST_DECORATORS = 20
"""Lines before a function's definition in which its decorators are."""


class NotImported(ValueError):
    """An import path that is malformed, or has no such module, file or name."""


def imported(path: str) -> Any:
    """Return what "my_module.my_name", "my_module:my_name" or "my_file.py:my_name" stands for.

    Modules are importable as they are: no other folders are searched. A file is a module of its
    own. Raises NotImported, and whatever the code itself raises when it is imported.
    """
    place, _, rest = path.rpartition(":" if ":" in path else ".")
    names, in_file = rest.split("."), ":" in path and place.endswith(".py")
    parts = names if in_file else [*place.split("."), *names]
    if not all(part.isidentifier() for part in parts):
        raise NotImported(
            "it is not an import path: write my_module.my_name, my_module:my_name or "
            "my_file.py:my_name"
        )
    found = _file(Path(place)) if in_file else _module(place)
    for name in names:
        if not hasattr(found, name):
            where = place if name is names[0] else getattr(found, "__name__", type(found).__name__)
            close = difflib.get_close_matches(name, dir(found), n=1)
            repair = f"did you mean {close[0]!r}?" if close else "check the spelling"
            raise NotImported(f"{where!r} has no {name!r}: {repair}")
        found = getattr(found, name)
    return found


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise
        raise NotImported(
            f"there is no module {error.name!r}: install it, or name its folder in "
            'run.import_paths, such as --set run.import_paths=["."]'
        ) from None


def _file(path: Path) -> ModuleType:
    """Import a file as a module of its own; its folder is not searched for others."""
    whole = path.absolute()
    name = f"{whole.stem}_{sha256(str(whole).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, whole)
        if spec is None or spec.loader is None or not whole.is_file():
            raise NotImported(f"the file {path} does not exist: check the path")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class CustomFunctionError(ValueError):
    """A user's function cannot be loaded or called, or returned an unusable value.

    `function` is its import path, `place` the sequence or group it was called with ("" if it was
    not called), `problem` what is wrong, with value, bound and repair. `frame` is the line of the
    user's code that raised, or the function that returned the value.
    """

    failure_class = "code"

    def __init__(self, function: str, place: str, problem: str, frame: str = "") -> None:
        super().__init__(function, place, problem, frame)
        self.function, self.place, self.problem, self.frame = function, place, problem, frame

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        line = f" ({where_of(self.frame)})" if self.frame else ""
        return f"custom function {self.function!r}{where}: {self.problem}{line}"

    def at(self, frame: str) -> CustomFunctionError:
        """Return the error with a frame; unchanged where it has one."""
        if self.frame:
            return self
        return CustomFunctionError(self.function, self.place, self.problem, frame)


def is_library(file: str) -> bool:
    """Whether a file belongs to Python's library or to an installed package."""
    installed = "site-packages" in file or "dist-packages" in file
    return installed or file.startswith((LIBRARY, "<"))


def is_ours(file: str) -> bool:
    """Whether a file belongs to Composer Mesh."""
    return PACKAGE in Path(file).parents


def frame_of(error: BaseException, calls: Callable[[str], bool] = is_ours) -> str:
    """Return the innermost frame of an error in the user's code, where the error was caught.

    Without one it is the innermost that is neither a library's nor of a file that only `calls` the
    user's functions.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return frame_at(error.filename, error.lineno or 0, "<module>")
    return _innermost(traceback.extract_tb(error.__traceback__), calls)


def frame_of_stack(frame: FrameType) -> str:
    """Return the innermost frame of a running thread in the user's code."""
    return _innermost(traceback.extract_stack(frame), is_ours)


def frame_of_function(function: Callable[..., Any]) -> str:
    """Return the line of a function's `def` as a frame; empty where its code is unknown."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    if code is None:
        return ""
    first = code.co_firstlineno  # of its decorators
    lines = (linecache.getline(code.co_filename, first + after) for after in range(MOST_DECORATORS))
    after = next((n for n, one in enumerate(lines) if one.lstrip().startswith(DEFINITIONS)), 0)
    return frame_at(code.co_filename, first + after, code.co_name)


def with_frame(error: BaseException) -> str:
    """Return the text of an error for the terminal: its frame first, where it has one."""
    frame = getattr(error, "frame", "")
    return f"{frame}\n{error}" if frame else str(error)


def where_of(frame: str) -> str:
    """Return file and line of a frame.

    >>> where_of("my_loss.py:12, in my_loss")
    'my_loss.py:12'
    """
    return frame.partition("\n")[0].rpartition(IN)[0]


def _innermost(frames: Iterable[traceback.FrameSummary], calls: Callable[[str], bool]) -> str:
    every = list(frames)
    theirs = [one for one in every if not calls(one.filename)]
    plain = [one for one in theirs if not is_library(one.filename)]
    own = [one for one in plain if not is_ours(one.filename)]
    for last in (own or plain or theirs or every)[-1:]:
        return frame_at(last.filename, last.lineno or 0, last.name)
    return ""


def frame_at(file: str, line: int, function: str) -> str:
    """Return the frame of a line of a file."""
    text = linecache.getline(file, line).strip()[:LONGEST_SOURCE]
    return f"{file}:{line}{IN}{function}" + (f"\n    {text}" if text else "")
