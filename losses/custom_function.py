"""User functions: inputs and outputs; loaded by import path, checked against their call, called.

Inputs have PRIME-RL's fields, and those on request. Every failure is a `CustomFunctionError` that
names the function, the line of the user's code and the sequence it was called with. The import
path is not modified.

Axes: T tokens of one sequence, S of them sampled (True in its mask), V vocabulary, H hidden size, P
prompts, G rollouts of one prompt. `custom` checks them when it calls the functions.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.configs.user_code import (
    CustomFunctionError,
    NotImported,
    frame_of,
    frame_of_function,
    imported,
    is_ours,
    where_of,
)

F = TypeVar("F", bound=Callable[..., Any])

NEEDS = ("entropies", "logits", "hidden_states")
"""Fields of `LossInputs` that a function gets only if it asks for them."""


def loss_needs(*names: str) -> Callable[[F], F]:
    """Decorate a loss function that reads these fields; `loss.needs` must then name them too.

    @loss_needs("entropies")
    def my_loss(inputs: LossInputs) -> LossOutputs: ...
    """

    def mark(function: F) -> F:
        function.needs = names  # type: ignore[attr-defined]
        return function

    return mark


@dataclass
class LossInputs:
    """One sequence as PRIME-RL passes it to a loss function; absent fields are None.

    `trainer_logprobs` is the current policy and carries the gradient, `inference_logprobs` are the
    generator's at sampling, `ref_logprobs` a frozen reference or teacher. `advantages` are per
    token; `loss_weights` scale a token's loss (None: 1 everywhere).

    The last three are the current policy's too, carry a gradient, and are there if `loss.needs`
    names them. Their rows are the predictions of the sampled tokens, `loss_mask` selects the
    same of the others. `logits` are divided by the sampling temperature, so that
    `logits.log_softmax(-1)` at the sampled ids are the `trainer_logprobs`; `entropies` are theirs
    in nats, over the whole vocabulary. `hidden_states` are the last ones, which the head reads.
    """

    trainer_logprobs: Float[Tensor, "T"]
    inference_logprobs: Float[Tensor, "T"]
    ref_logprobs: Float[Tensor, "T"] | None
    advantages: Float[Tensor, "T"]
    loss_mask: Bool[Tensor, "T"]
    loss_weights: Float[Tensor, "T"] | None = None
    entropies: Float[Tensor, "S"] | None = None
    logits: Float[Tensor, "S V"] | None = None
    hidden_states: Float[Tensor, "S H"] | None = None

    @property
    def teacher_logprobs(self) -> Float[Tensor, "T"] | None:
        """`ref_logprobs` by the name it had in PRIME-RL until mid-2026."""
        return self.ref_logprobs


@dataclass
class LossOutputs:
    """Output of a loss function: a scalar sum over its tokens, and metrics.

    A metric is a number, a scalar tensor or a 1-D tensor.
    """

    loss: Tensor
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class AdvantageInputs:
    """Rollouts by prompt: `rollouts[i][j]` is the j-th rollout of prompt i, all groups of one size.

    A rollout is a mapping with at least `reward`.
    """

    rollouts: list[list[Any]]


@dataclass
class AdvantageOutputs:
    """Output of an advantage function: one number per rollout, of shape [P, G]."""

    advantages: Tensor


STAND_INS = {
    "prime_rl.trainer.rl.loss": (LossInputs, LossOutputs),
    "prime_rl.orchestrator.advantage": (AdvantageInputs, AdvantageOutputs),
}


@contextmanager
def prime_rl_names() -> Iterator[None]:
    """Make these classes importable under PRIME-RL's module names in the block, if not installed.

    So a user's module with `from prime_rl.trainer.rl.loss import LossOutputs` loads unchanged. An
    installed PRIME-RL is never shadowed, and the names are removed afterwards.
    """
    if "prime_rl" in sys.modules or importlib.util.find_spec("prime_rl"):
        yield
        return
    modules = dict[str, ModuleType]()
    for path, classes in STAND_INS.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            modules.setdefault(name, ModuleType(name))
        vars(modules[path]).update({each.__name__: each for each in classes})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


Function = Callable[..., Any]


def load_function(import_path: str) -> Function:
    """Import and return the function at "my_module.my_loss" or "my_file.py:my_loss".

    Its module can import PRIME-RL's dataclasses even if PRIME-RL is not installed
    (`prime_rl_names`). Raises `CustomFunctionError`
    if the path is malformed, the module fails to import (chained), or the name is not in it or is
    no function.
    """
    try:
        with prime_rl_names():
            found = imported(import_path)
    except NotImported as error:
        raise CustomFunctionError(import_path, "", str(error)) from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise CustomFunctionError(import_path, "", _problem(error), _own_frame(error)) from error
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
        problem = f"it raised {type(error).__name__}: {error}{_described(error, inputs)}"
        raise CustomFunctionError(name, place, problem, frame_of(error)) from error


@contextmanager
def returned_by(function: Function) -> Iterator[None]:
    """Name the line where a function is defined in an error about what it returned."""
    try:
        yield
    except CustomFunctionError as error:
        raise error.at(frame_of_function(function)) from error.__cause__


def _described(error: BaseException, inputs: object) -> str:
    """Return what a function could have read of its inputs, as the end of an error's text."""
    match inputs:
        case LossInputs():
            known = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
            shapes = [f"{name} {[*one.shape]}" for name, one in known.items() if one is not None]
            text = f"; its inputs have {', '.join(shapes)}"
        case AdvantageInputs(rollouts=[[Mapping() as first, *_], *_] as rollouts):
            known = dict(first)
            text = (
                f"; its inputs have {len(rollouts)} groups of {len(rollouts[0])} rollouts, each "
                f"with {', '.join(map(repr, first))}"
            )
        case _:
            return ""
    wrong = error.name if isinstance(error, AttributeError) and error.obj is inputs else None
    wrong = error.args[0] if isinstance(error, KeyError) and error.args else wrong
    close = difflib.get_close_matches(str(wrong), known, n=1)
    return f": did you mean {close[0]!r}?{text}" if wrong and close else text


def attribute(name: str, place: str, output: object, wanted: str, default: Any = ...) -> Any:
    """Return an attribute of the function's result, whatever its class."""
    value = getattr(output, wanted, default)
    if value is ...:
        raise CustomFunctionError(
            name,
            place,
            f"it returned {_kind(output)} without {wanted!r}: return LossOutputs(loss,"
            " metrics) from a loss and AdvantageOutputs(advantages) from an advantage",
        )
    return value


def _kind(output: object) -> str:
    return "None" if output is None else f"a {type(output).__name__}"


def place_of(kind: str, index: int, identifier: str | None = None) -> str:
    """Describe a sequence or group in an error: its index and, if it has one, its id."""
    return f"{kind} {index}" if identifier is None else f"{kind} {index} ({identifier})"


def _own_frame(error: BaseException) -> str:
    """Return the line of the user's module whose import failed; empty for one that is absent."""
    frame = frame_of(error)
    file = where_of(frame).rpartition(":")[0]
    return "" if is_ours(file) or file.startswith("<") else frame


def _problem(error: BaseException) -> str:
    missing = error.name if isinstance(error, ImportError) else None
    if missing and missing.split(".")[0] == "prime_rl":
        known = ", ".join(
            f"{path}.{each.__name__}" for path in STAND_INS for each in STAND_INS[path]
        )
        return f"{error}: prime-rl is not installed and only {known} stand in for it: install it"
    return f"importing it raised {type(error).__name__}: {error}"
