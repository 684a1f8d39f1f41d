"""Everything that a user's code may raise and that is no ordinary exception."""

from __future__ import annotations

import asyncio

KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        asyncio.CancelledError,
        StopIteration,
        StopAsyncIteration,
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
    )
}


def raised(name: str) -> BaseException:
    """Return an error of one of the kinds, or a group of them."""
    if name == "BaseExceptionGroup":
        return BaseExceptionGroup("of the user", [KeyboardInterrupt()])
    return KINDS[name]("of the user")


def fail(name: str) -> None:
    """Raise an error of one of the kinds."""
    raise raised(name)


NAMES = [*KINDS, "BaseExceptionGroup"]
