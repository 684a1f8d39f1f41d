"""Drives a run under faults from its start to its end, or until it counts as hung."""

import time
from collections.abc import Callable

from chaos_inject import Injector
from chaos_judge import Ended
from chaos_run import LiveRun

POLL_S = 0.1
SAY_S = 20.0
START_BOUND_S = 900.0
"""Bound until the first evaluation, because a warm start precedes it."""
LEFT_AFTER_S = 10.0


def run_through(
    run: LiveRun,
    injector: Injector,
    bound_s: float,
    beside: Callable[[], None] = lambda: None,
    left_after_s: float = LEFT_AFTER_S,
) -> Ended:
    """Inject faults until the run has ended, then check what is left. A run that stalls is killed.

    `beside` is called as often as the injector.
    """
    waits, said = 0, 0.0
    while not run.ended:
        time.sleep(POLL_S)
        run.poll()
        injector.step()
        beside()
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            _say(run, injector)
        if run.since_progress_s > (2 * bound_s if run.progress else START_BOUND_S):
            waits += 1
            break
    stuck = not run.ended
    left = [] if stuck else _left(run, left_after_s)
    run.kill()
    run.poll()
    _say(run, injector)
    hangs = waits + (not stuck and run.longest_wait_s() > bound_s)
    return Ended(run, injector.applied, injector.left, run.process.returncode, hangs, left)


def _left(run: LiveRun, after_s: float) -> list[int]:
    """Return the processes that outlived the command by `after_s`."""
    end = time.monotonic() + after_s
    while (left := run.processes()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return left


def _say(run: LiveRun, injector: Injector) -> None:
    print(
        f"{run.root.name}: {time.monotonic() - run.began:.0f} s, step {len(run.metrics)}, "
        f"{len(injector.applied)} faults struck, {len(injector.left)} to come",
        flush=True,
    )
