"""Striking hosts by a schedule: only when two are there and the run moves; others come for them."""

from __future__ import annotations

import importlib
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

inject: Any = importlib.import_module("chaos_hosts")
schedule: Any = importlib.import_module("chaos_schedule")
runs: Any = importlib.import_module("chaos_run")

HostFault = schedule.HostFault
STEPS = 10


@dataclass
class FakeProcess:
    ended: bool = False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended = True


@dataclass
class FakeWorker:
    processes: set[int] = field(default_factory=lambda: {1, 2})
    heard: list[Any] = field(default_factory=list)
    process: FakeProcess = field(default_factory=FakeProcess)

    def family(self) -> set[int]:
        return self.processes

    def send(self, number: Any) -> None:
        self.heard.append(number)

    def kill(self) -> None:
        self.processes = set()


@dataclass
class FakeNet:
    dropped: set[int] = field(default_factory=set)

    def cut(self, host: int) -> None:
        self.dropped.add(host)

    def heal(self, host: int) -> None:
        self.dropped.remove(host)


@dataclass
class FakeCluster:
    net: FakeNet = field(default_factory=FakeNet)
    workers: dict[str, FakeWorker] = field(default_factory=dict)

    def start(self, *options: str) -> None:
        self.workers[f"host-{len(self.workers)}"] = FakeWorker()

    def number(self, name: str) -> int:
        return int(name[-1]) + 1


@dataclass
class FakeRun:
    root: Path = Path("run")
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[int] = field(default_factory=list)
    ended: bool = False

    def tell(self, kind: str, host: str) -> None:
        self.events.append({"event": kind, "fields": {"host": host}})

    def actors(self) -> list[Any]:
        return [runs.Actor("trainer", "trainer", 1, "host-0")]


class Scene:
    """Two hosts of which the first has the trainer, and one fault that is due."""

    def __init__(self, fault: Any) -> None:
        self.run, self.hosts = FakeRun(), FakeCluster()
        for number in range(2):
            self.hosts.start()
            self.run.tell("host_joined", f"host-{number}")
        plan = [schedule.PlannedHost(0, 0.2, 1, fault)]
        self.injector = inject.HostInjector(self.run, self.hosts, plan, STEPS)

    def after(self, steps: int) -> list[Any]:
        """The faults that have struck once the run has done so many steps."""
        self.run.metrics = list(range(steps))
        self.injector.step()
        struck: list[Any] = self.injector.struck
        return struck

    @property
    def victim(self) -> FakeWorker:
        return self.hosts.workers["host-0"]


def test_a_fault_waits_for_its_share_of_the_steps() -> None:
    scene = Scene(HostFault.KILLED)
    assert scene.after(1) == []
    (struck,) = scene.after(2)
    assert (struck.host, struck.actors) == ("host-0", ("trainer",))
    assert scene.victim.family() == set()


def test_no_host_is_struck_while_one_is_missing_or_before_a_step_after_that() -> None:
    scene = Scene(HostFault.KILLED)
    scene.run.tell("host_lost", "host-1")
    assert scene.after(5) == []
    scene.run.tell("host_joined", "host-2")
    assert scene.after(5) == []
    assert len(scene.after(6)) == 1


def test_another_host_comes_once_the_loss_is_known() -> None:
    scene = Scene(HostFault.KILLED)
    scene.after(3)
    scene.after(3)
    assert len(scene.hosts.workers) == 2
    scene.run.tell("host_lost", "host-0")
    scene.after(3)
    assert set(scene.hosts.workers) == {"host-0", "host-1", "host-2"}


def test_a_hung_host_is_killed_when_the_run_has_declared_it_lost() -> None:
    scene = Scene(HostFault.HUNG)
    scene.after(3)
    scene.after(3)
    assert scene.victim.heard == [signal.SIGSTOP]
    assert scene.victim.family()
    scene.run.tell("host_lost", "host-0")
    (struck,) = scene.after(3)
    assert not scene.victim.family()
    assert struck.gone is None


def test_a_cut_host_is_connected_again_when_it_has_ended_its_own() -> None:
    scene = Scene(HostFault.CUT)
    scene.after(3)
    assert scene.hosts.net.dropped == {1}
    scene.run.tell("host_lost", "host-0")
    (struck,) = scene.after(3)
    assert (struck.gone, scene.hosts.net.dropped) == (None, {1})
    scene.victim.processes = set()
    (struck,) = scene.after(3)
    assert struck.gone is not None
    assert scene.hosts.net.dropped == set()
    assert len(scene.hosts.workers) == 3


@pytest.mark.parametrize("passed_s", [inject.SHORT_S - 0.5, inject.SHORT_S + 0.5])
def test_a_short_cut_ends_by_itself_and_costs_no_host(passed_s: float) -> None:
    scene = Scene(HostFault.SHORT)
    (struck,) = scene.after(3)
    struck.time -= passed_s
    scene.after(3)
    assert bool(scene.hosts.net.dropped) is (passed_s < inject.SHORT_S)
    assert len(scene.hosts.workers) == 2


def test_a_worker_that_came_too_late_for_the_run_is_told_to_end() -> None:
    scene = Scene(HostFault.KILLED)
    scene.hosts.start()
    scene.run.ended = True
    scene.injector.step()
    ended = {name for name, one in scene.hosts.workers.items() if one.process.ended}
    assert ended == {"host-2"}
