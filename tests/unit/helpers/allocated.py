"""What torch's CPU allocator gives out while something runs, by its own events."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once, beyond those from before the call."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()  # whose memory is freed after the last event
    del kept
    events = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert events, "the profiler saw no allocation"
    return most
