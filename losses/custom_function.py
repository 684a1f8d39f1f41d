"""User functions: loaded by import path, checked against their call, and called.

Every failure is a `CustomFunctionError` that names the function and the sequence it was called
with. The import path is not modified.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.losses.custom_types import STAND_INS, prime_rl_names

Function = Callable[..., Any]


class CustomFunctionError(ValueError):
    """A user's function cannot be loaded or called, or returned an unusable value.

    `function` is its import path, `place` the sequence or group it was called with ("" if it was
    not called), `problem` what is wrong, with value, bound and repair.
    """

    def __init__(self, function: str, place: str, problem: str) -> None:
        super().__init__(function, place, problem)
        self.function, self.place, self.problem = function, place, problem

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        return f"custom function {self.function!r}{where}: {self.problem}"


def load_function(import_path: str) -> Function:
    """Import and return the function at "my_module.my_loss" or "my_module:my_loss".

    The module must be importable as it is: no other folders are searched. It can import PRIME-RL's
    dataclasses even if PRIME-RL is not installed (`prime_rl_names`). Raises `CustomFunctionError`
    if the path is malformed, the module fails to import (chained), or the name is not in it or is
    no function.
    """
    module_name, names = _split(import_path)
    found: Any = _import(import_path, module_name)
    for name in names:
        if not hasattr(found, name):
            raise CustomFunctionError(import_path, "", _missing(found, name))
        found = getattr(found, name)
    if not callable(found):
        raise CustomFunctionError(
            import_path, "", f"it is of type {type(found).__name__}: name a function instead"
        )
    return found


def check_signature(
    function: Function, name: str, kwargs: Mapping[str, Any], given: str = "inputs"
) -> None:
    """Raise unless `function(inputs, **kwargs)` can be called; it is not called.

    `given` is the name of the one argument in errors.
    """
    if inspect.iscoroutinefunction(function):
        raise CustomFunctionError(name, "", "it is a coroutine function: write def, not async def")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a C function without a signature: the call will show it
    try:
        signature.bind(object(), **kwargs)
    except TypeError as error:
        called = ", ".join([given, *(f"{key}={value!r}" for key, value in kwargs.items())])
        raise CustomFunctionError(
            name,
            "",
            f"it is called with ({called}) but takes {signature} ({error}): give it one positional"
            f" argument, the {given}, and a parameter for each key of kwargs, or change kwargs",
        ) from error


def call_function(
    function: Function, name: str, place: str, inputs: object, kwargs: Mapping[str, Any]
) -> Any:
    """Call the function; its exception becomes the cause of an error that names it."""
    try:
        return function(inputs, **kwargs)
    except BaseException as error:
        if is_interrupt(error):
            raise
        problem = f"it raised {type(error).__name__}: {error}"
        raise CustomFunctionError(name, place, problem) from error


def attribute(name: str, place: str, output: object, wanted: str, default: Any = ...) -> Any:
    """Return an attribute of the function's result, whatever its class."""
    value = getattr(output, wanted, default)
    if value is ...:
        raise CustomFunctionError(
            name,
            place,
            f"it returned a {type(output).__name__} without {wanted!r}: return LossOutputs(loss,"
            " metrics) from a loss and AdvantageOutputs(advantages) from an advantage",
        )
    return value


def place_of(kind: str, index: int, identifier: str | None = None) -> str:
    """Describe a sequence or group in an error: its index and, if it has one, its id."""
    return f"{kind} {index}" if identifier is None else f"{kind} {index} ({identifier})"


def _split(import_path: str) -> tuple[str, list[str]]:
    colon = ":" in import_path
    module_name, _, rest = import_path.partition(":") if colon else import_path.rpartition(".")
    names = rest.split(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *names]):
        raise CustomFunctionError(
            import_path, "", "it is no import path: write my_module.my_loss or my_module:my_loss"
        )
    return module_name, names


def _import(import_path: str, module_name: str) -> Any:
    try:
        with prime_rl_names():
            return importlib.import_module(module_name)
    except BaseException as error:
        if is_interrupt(error):
            raise
        problem = _import_problem(module_name, error)
        raise CustomFunctionError(import_path, "", problem) from error


def _import_problem(module_name: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ImportError) else None
    absent = isinstance(error, ModuleNotFoundError)
    if absent and missing and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing!r}: install it, or name its folder in run.import_paths, "
            'such as --set run.import_paths=["."]'
        )
    if missing and missing.split(".")[0] == "prime_rl":
        known = ", ".join(
            f"{path}.{each.__name__}" for path in STAND_INS for each in STAND_INS[path]
        )
        return f"{error}: prime-rl is not installed and only {known} stand in for it: install it"
    return f"importing module {module_name!r} raised {type(error).__name__}: {error}"


def _missing(holder: object, name: str) -> str:
    where = getattr(holder, "__name__", type(holder).__name__)
    close = difflib.get_close_matches(name, dir(holder), n=1)
    repair = f"did you mean {close[0]!r}?" if close else "check the spelling"
    return f"{where!r} has no {name!r}: {repair}"
