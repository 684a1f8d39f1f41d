"""Work in a thread of its own that never keeps a process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> "Future[T]":
    """Start work; return its future. It ends with the process, wherever it is."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="island", daemon=True).start()
    return future
