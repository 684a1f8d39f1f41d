"""What kind of failure an error is, which decides what is done about it.

    class           what it is                              what helps
    infrastructure  a process, a machine or its memory      a new process, the same work again
    provider        somebody else's service                 waiting, another provider
    data            one input that cannot be worked off     setting it aside
    code            everything else: a bug, a wrong config  a person; never the same thing again

An error of another floor says its class itself, by an attribute `failure_class`. Nothing here
restarts, retries or counts.
"""

from __future__ import annotations

import errno
from enum import Enum

from composer_mesh.mesh.supervision import MeshError, RemoteError

LONGEST_KEY = 500
"""Characters of an error that tell it from others; what was raised may hold model-written text."""

_WORN_OUT = frozenset(
    {errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EADDRINUSE}
)
"""What a machine runs out of for a while."""

_NO_MEMORY = ("can't allocate memory", "out of memory")


class FailureClass(Enum):
    """Whose failure it is; the values are the words of events and reports."""

    INFRASTRUCTURE = "infrastructure"
    PROVIDER = "provider"
    DATA = "data"
    CODE = "code"


def classify(error: BaseException) -> FailureClass:
    """The class of an error, by its own word where it has one.

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
        return FailureClass.INFRASTRUCTURE  # how torch says what others say by MemoryError
    return FailureClass.CODE


def is_deterministic(error: BaseException) -> bool:
    """Whether the same work would fail in the same way: a second equal error proves it."""
    return classify(error) in (FailureClass.CODE, FailureClass.DATA)


def error_key(error: BaseException) -> str:
    """The type and the message of an error: what makes two errors the same.

    >>> error_key(KeyError("no key"))
    "KeyError: 'no key'"
    """
    return f"{type(error).__name__}: {error}"[:LONGEST_KEY]


def cause_of(error: BaseException) -> str:
    """An error in one line, for an event."""
    return " ".join(error_key(error).split())
