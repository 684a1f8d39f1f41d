"""Injects a schedule of faults into a live run to its end, and records what actually happened.

A fault counts when it took effect: one that found no process, or whose endpoint was not called, is
retried later.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chaos_run import Actor, LiveRun, Tail
from chaos_schedule import CALM, ENDS_THE_PROCESS, Fault, Planned

from composer_mesh.mesh.processes import is_alive

ARMED_S = 45.0
"""How long a fault waits for its endpoint to be called."""
AT_WORK = {"expert_server": "describe"}
"""Endpoint of exceptions for kinds with no other busy endpoint; any endpoint for the others."""
INSIDE = frozenset({Fault.RAISE, Fault.MEMORY})
"""Faults injected in an endpoint, because a caller must see them."""
POLL_S = 0.1
SAY_S = 20.0
START_BOUND_S = 900.0
"""Bound until the first evaluation, because a warm start precedes it."""
LEFT_AFTER_S = 10.0
FROM_OUTSIDE = {Fault.KILL: signal.SIGKILL, Fault.STOP: signal.SIGSTOP}


@dataclass(frozen=True)
class Applied:
    """A fault that took effect: when (seconds since 1970) and on which process."""

    planned: Planned
    time: float
    actor: str
    pid: int
    endpoint: str = ""


@dataclass(frozen=True)
class _Armed:
    planned: Planned
    actor: Actor
    until: float


@dataclass
class Injector:
    """One schedule on one run; call `step()` repeatedly while the run is live."""

    run: LiveRun
    plan: Sequence[Planned]
    steps: int
    folder: Path
    applied: list[Applied] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = list(self.plan)
        self._due: dict[int, float] = {}
        self._armed: dict[int, _Armed] = {}
        self._ledger = Tail(self.folder / "applied.jsonl")
        self._hit: set[int] = set()

    @property
    def left(self) -> list[Planned]:
        """Faults that did not take effect."""
        return [*self._waiting, *(armed.planned for armed in self._armed.values())]

    def step(self) -> None:
        """Inject the faults that are due, and record those that took effect."""
        ended = {n for n, armed in self._armed.items() if not is_alive(armed.actor.pid)}
        self._read_ledger()
        self._rearm(ended)
        share = len(self.run.metrics) / self.steps
        if not self.run.metrics or share > CALM:
            return
        now, actors = time.monotonic(), self.run.actors()
        for planned in [one for one in self._waiting if one.at <= share]:
            due = self._due.setdefault(planned.number, now + planned.delay_s)
            if due <= now and (actor := self._target(planned, actors)) is not None:
                self._strike(planned, actor)

    def _target(self, planned: Planned, actors: Sequence[Actor]) -> Actor | None:
        """Return the `place`-th actor of the kind, or the next one if that was hit before."""
        spared = self._hit | {armed.actor.pid for armed in self._armed.values()}
        slots = [one for one in actors if one.kind == planned.kind]
        for turn in range(len(slots)):
            actor = slots[(planned.place + turn) % len(slots)]
            if actor.pid not in spared:
                return actor
        return None

    def _strike(self, planned: Planned, actor: Actor) -> None:
        endpoint = planned.endpoint
        if endpoint is None and planned.fault in INSIDE:
            endpoint = AT_WORK.get(planned.kind, "*")
        if endpoint is None and planned.fault in FROM_OUTSIDE:
            self._signal(planned, actor)
        elif self._send(planned, actor, endpoint):
            self._waiting.remove(planned)
            self._armed[planned.number] = _Armed(planned, actor, time.monotonic() + ARMED_S + 5)

    def _signal(self, planned: Planned, actor: Actor) -> None:
        with contextlib.suppress(ProcessLookupError):
            struck = time.time()
            os.kill(actor.pid, FROM_OUTSIDE[planned.fault])
            self._waiting.remove(planned)
            self._note(Applied(planned, struck, actor.name, actor.pid))

    def _send(self, planned: Planned, actor: Actor, endpoint: str | None) -> bool:
        order = {
            "number": planned.number,
            "fault": planned.fault.value,
            "endpoint": endpoint,
            "until": time.time() + ARMED_S,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            try:
                address = str(self.folder / f"{actor.pid}.sock")
                sender.sendto(json.dumps(order).encode(), address)
            except OSError:  # it is gone, or not started yet
                return False
        return True

    def _read_ledger(self) -> None:
        for line in self._ledger.read():
            armed = self._armed.pop(line["number"], None)
            if armed is not None:
                struck, endpoint = line["time"], line["endpoint"]
                self._note(
                    Applied(armed.planned, struck, armed.actor.name, armed.actor.pid, endpoint)
                )

    def _rearm(self, ended: set[int]) -> None:
        """Reschedule faults whose process ended first, or whose endpoint was not called.

        `ended` was found before the ledger was read, so that a fault that ended its process counts.
        """
        now = time.monotonic()
        for number, armed in list(self._armed.items()):
            if number in ended or now > armed.until:
                del self._armed[number]
                self._waiting.append(replace(armed.planned, delay_s=0.0))
                self._due.pop(number)

    def _note(self, applied: Applied) -> None:
        self.applied.append(applied)
        if applied.planned.fault in ENDS_THE_PROCESS:
            self._hit.add(applied.pid)


@dataclass(frozen=True)
class Ended:
    """A finished run: ended by itself, or killed because it stalled for too long."""

    run: LiveRun
    applied: Sequence[Applied]
    missed: Sequence[Planned]
    """Faults that found no target."""
    status: int
    hangs: int
    left: Sequence[int]
    """Processes that outlived the command."""


def run_through(
    run: LiveRun,
    injector: Injector,
    bound_s: float,
    also: Callable[[], None] = lambda: None,
    left_after_s: float = LEFT_AFTER_S,
) -> Ended:
    """Inject faults until the run has ended, then check what remains. A run that stalls is killed.

    `also` is called as often as the injector.
    """
    waits, said = 0, 0.0
    while not run.ended:
        time.sleep(POLL_S)
        run.poll()
        injector.step()
        also()
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
