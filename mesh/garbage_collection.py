"""Keeps garbage collections short and rare in processes that serve an event loop."""

import gc
from functools import cache

RARELY = (5_000, 20, 20)
"""Thresholds of the controller's collections: a full one after two million new containers.

It has no tensors that cyclic garbage could hold. By default a full one comes after 70,000, and with
the rollouts of thousands of episodes in memory each would take tenths of a second.
"""


@cache
def leave_out_loaded() -> None:
    """Leave the objects that exist now out of garbage collections; does so once in a process.

    What torch, transformers and Monarch create on import lives as long as the process. A full
    collection would visit all of it, and stop the event loop for tenths of a second each time.
    """
    gc.freeze()


def collect_rarely() -> None:
    """Make garbage collections of this process as rare as suits a controller."""
    gc.set_threshold(*RARELY)
