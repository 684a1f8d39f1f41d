"""Ctrl-C, as opposed to an error of a user's code that looks like it."""

import threading


def is_interrupt(error: BaseException) -> bool:
    """Whether a person has pressed Ctrl-C, which only the main thread receives.

    Whatever else a user's code raises, SystemExit and CancelledError included, is its error.
    """
    main = threading.current_thread() is threading.main_thread()
    return isinstance(error, KeyboardInterrupt) and main
