"""Classifies errors; the class decides how a failure is handled.

    class           what it is                              what helps
    infrastructure  a process, a machine or its memory      a new process, the same work again
    provider        an external service                     waiting, another provider
    data            one input that cannot be processed      quarantining it
    code            everything else: a bug, a wrong config  a fix; never a retry

An error of another layer sets its class by an attribute `failure_class`. One that sets it to `data`
or `code`, such as that of a user's function, restarts no process.
"""

from __future__ import annotations

import errno
from enum import Enum

from composer_mesh.mesh.supervision import MeshError, Recorder, RemoteError
from composer_mesh.mesh.waiting import Failed

LONGEST_KEY = 500
"""Characters by which errors are compared; a message may contain model-written text."""

_WORN_OUT = frozenset(
    {errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRINUSE}
)
"""Resources that a machine runs out of temporarily."""

_NO_MEMORY = ("can't allocate memory", "out of memory")


class FailureClass(Enum):
    """The class of a failure; the values appear in events and reports."""

    INFRASTRUCTURE = "infrastructure"
    PROVIDER = "provider"
    DATA = "data"
    CODE = "code"


def classify(error: BaseException) -> FailureClass:
    """Return the class of an error, from its `failure_class` if it has one.

    >>> classify(MemoryError()).value
    'infrastructure'
    """
    own = getattr(error, "failure_class", None)
    if own is not None:
        return FailureClass(own)
    if isinstance(error, RemoteError):
        return FailureClass.CODE
    if isinstance(error, MeshError | MemoryError | ConnectionError):
        return FailureClass.INFRASTRUCTURE
    if isinstance(error, OSError) and error.errno in _WORN_OUT:
        return FailureClass.INFRASTRUCTURE
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return FailureClass.INFRASTRUCTURE  # torch's equivalent of MemoryError
    return FailureClass.CODE


def is_deterministic(error: BaseException) -> bool:
    """Whether the same work would fail in the same way: a second equal error confirms it."""
    return classify(error) in (FailureClass.CODE, FailureClass.DATA)


def states_its_cause(error: BaseException) -> bool:
    """Whether an error says by itself that the same work fails again, so that no restart helps.

    User code that raises does, for example. Other errors are only presumed to be deterministic
    until a second one is equal.
    """
    own = getattr(error, "failure_class", None)
    return own is not None and is_deterministic(error)


def error_key(error: BaseException) -> str:
    """Return the type and message of an error; equal keys mean equal errors.

    >>> error_key(KeyError("no key"))
    "KeyError: 'no key'"
    """
    return f"{type(error).__name__}: {error}"[:LONGEST_KEY]


def cause_of(error: BaseException) -> str:
    """Return an error in one line, for an event."""
    return " ".join(error_key(error).split())


def recorded_by(record: Recorder) -> Failed:
    """Return a callback that records a task's exception as the event `task_failed`."""

    def failed(name: str, error: BaseException) -> None:
        about = {"cause": cause_of(error), "class": classify(error).value}
        record("task_failed", "", f"{name}: {cause_of(error)}", **about)

    return failed
