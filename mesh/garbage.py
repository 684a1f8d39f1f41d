"""Keeps garbage collections short in processes that serve an event loop."""

import gc
from functools import cache


@cache
def leave_out_loaded() -> None:
    """Leave the objects that exist now out of garbage collections; does so once in a process.

    What torch, transformers and Monarch create on import lives as long as the process. A full
    collection would visit all of it, and stop the event loop for tenths of a second each time.
    """
    gc.freeze()
