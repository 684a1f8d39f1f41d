"""The chaos run on two hosts, with and without faults on actors and hosts, and its verdict.

Each host is a worker in its own network namespace, in both runs, so that they differ only by the
faults; the controller has one too, which is never cut. A fault of a host is injected only while
two hosts are attached and the run progresses; for each lost host another one joins, at another
address.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos_inject import Injector, run_through
from chaos_judge import Verdict, fill_report, judge, print_tables, write_outcomes
from chaos_outcomes import (
    HostOutcome,
    StruckHost,
    cells,
    host_outcomes,
    lost_for_nothing,
    unexplained,
)
from chaos_run import LiveRun, environment, host_of, launched
from chaos_schedule import HostFault, Planned, PlannedHost, host_schedule, schedule
from cut_net import Net, net
from report import Report
from run_workers import Worker, start_worker

from composer_mesh.mesh.hosts.certificates import make_authority
from composer_mesh.mesh.hosts.roster import ROSTER

LEFT_AFTER_S = 30.0
HOST_COLUMNS = ("host", "faults", "detected s", "recovered s", "fenced s", "as it must be")
HOSTS = 2
LEASE_S = 6.0
SHORT_S = LEASE_S / 5
CALM_S = 2 * LEASE_S
"""Time after a short cut within which it must have had no effect."""
LOST_BOUND_S = 10 * LEASE_S
"""A host not reported as lost by then is killed, and the fault counts as not healed."""


@dataclass
class Cluster:
    """The workers of one run, by the run's names for them."""

    net: Net
    folder: Path
    authority: Path
    marker: str
    hook: Path
    workers: dict[str, Worker] = field(default_factory=dict)

    def start(self, *options: str) -> Worker:
        """Start a worker on the next host. Never blocks."""
        name = f"host-{len(self.workers)}"
        options = ("--listen", "tls://auto:0", "--lease", str(LEASE_S), *options)
        env = environment(self.marker, self.hook)
        within = self.net.within(self.number(name))
        one = start_worker(self.folder, name, self.authority, *options, within=within, env=env)
        self.workers[name] = one
        return one

    def number(self, name: str) -> int:
        """Return the network host number of a worker; 0 is the controller's."""
        return int(name.rpartition("-")[2]) + 1


@contextlib.contextmanager
def cluster(net: Net, folder: Path, authority: Path, marker: str, hook: Path) -> Iterator[Cluster]:
    """Start the first workers of a run, listening; all are killed at the end of the block."""
    made = Cluster(net, folder, authority, marker, hook)
    folder.mkdir(parents=True)
    try:
        for _ in range(HOSTS):
            made.start()
        for one in made.workers.values():
            one.until_it_listens()
        yield made
    finally:
        for one in made.workers.values():
            one.kill()


@dataclass
class HostInjector:
    """One schedule on one run; call `step()` repeatedly, also after the run has ended."""

    run: LiveRun
    hosts: Cluster
    plan: Sequence[PlannedHost]
    steps: int
    struck: list[StruckHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = list(self.plan)
        self._under_way: StruckHost | None = None
        self._calm_since = 0
        self._cut: set[str] = set()

    @property
    def left(self) -> list[PlannedHost]:
        """Faults that were not injected."""
        return list(self._waiting)

    def step(self) -> None:
        """Inject a fault that is due, and follow up on the host that was hit."""
        for worker in self.hosts.workers.values():
            worker.family()  # records a host's child processes before they are needed
        if self.run.ended:
            self._end_strangers()
        if self._under_way is not None:
            self._see_to(self._under_way)
        elif self._waiting and self._moves():
            share = len(self.run.metrics) / self.steps
            if share >= self._waiting[0].at and (actors := self._actors()):
                self._strike(self._waiting.pop(0), actors)

    def attached(self) -> list[str]:
        """Return the run's attached hosts, in the order in which they joined."""
        return [
            name
            for name in self._hosts_in("host_joined")
            if name not in self._hosts_in("host_lost")
        ]

    def _hosts_in(self, kind: str) -> list[str]:
        return [host_of(event) or "" for event in self.run.events if event["event"] == kind]

    def _moves(self) -> bool:
        """Whether two hosts are attached, and a step was done since."""
        if len(self.attached()) < HOSTS:
            self._calm_since = len(self.run.metrics)
        return not self.run.ended and len(self.run.metrics) > self._calm_since

    def _actors(self) -> Mapping[str, tuple[str, ...]]:
        """Return the actors by host; hosts without actors are left out."""
        there = self.attached()
        found: dict[str, tuple[str, ...]] = {}
        for actor in self.run.actors():
            if actor.host in there:
                found[actor.host] = (*found.get(actor.host, ()), actor.name)
        return dict(sorted(found.items()))

    def _strike(self, planned: PlannedHost, actors: Mapping[str, tuple[str, ...]]) -> None:
        host = list(actors)[planned.place % len(actors)]
        struck = StruckHost(planned, time.time(), host, actors[host])
        worker = self.hosts.workers[host]
        if planned.fault is HostFault.KILLED:
            worker.kill()
            struck.gone = time.time()
        elif planned.fault is HostFault.HUNG:
            worker.send(signal.SIGSTOP)
        else:
            self._cut.add(host)
            self.hosts.net.cut(self.hosts.number(host))
        self.struck.append(struck)
        self._under_way = struck
        print(f"{planned.fault}: {host} with {', '.join(struck.actors)}", flush=True)

    def _see_to(self, struck: StruckHost) -> None:
        worker, since = self.hosts.workers[struck.host], time.time() - struck.time
        fault, lost = struck.planned.fault, struck.host in self._hosts_in("host_lost")
        if fault is HostFault.SHORT:
            if since > SHORT_S:
                self._heal(struck.host)
            if lost or since > CALM_S:
                self._go_on(replace=lost)
            return
        if fault is HostFault.CUT and struck.gone is None and not worker.family():
            struck.gone = time.time()
        over = since > LOST_BOUND_S or self.run.ended
        if fault is HostFault.HUNG and (lost or over):
            worker.kill()  # a stopped process cannot end itself
        if (lost or over) and not worker.family():
            self._go_on(replace=True)
        elif since > LOST_BOUND_S:
            worker.kill()

    def _go_on(self, replace: bool) -> None:
        assert self._under_way is not None
        self._heal(self._under_way.host)
        self._under_way = None
        self._calm_since = len(self.run.metrics)
        if replace and not self.run.ended:
            self.hosts.start("--roster", str(self.run.root / ROSTER))

    def _heal(self, host: str) -> None:
        if host in self._cut:
            self._cut.remove(host)
            self.hosts.net.heal(self.hosts.number(host))

    def _end_strangers(self) -> None:
        """Terminate workers that started too late for the run to attach them."""
        known = self._hosts_in("host_joined")
        for name, worker in self.hosts.workers.items():
            if name not in known and worker.process.poll() is None:
                worker.process.terminate()


@dataclass(frozen=True)
class OnHosts:
    """A finished run on hosts: its verdict, and the outcomes of its host faults."""

    verdict: Verdict
    hosts: Sequence[HostOutcome]
    missed: Sequence[PlannedHost]
    for_nothing: int
    """Hosts that the run reported lost although they were there."""


def hosts_struck(given: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> Report:
    """Do both runs and print their tables. Raises `NotPermitted` where hosts cannot be made."""
    plan = schedule(given.seed, given.faults or (10 if given.quick else 30), given.kinds)
    hosts = host_schedule(given.seed, given.host_faults or (3 if given.quick else 6))
    report = Report("chaos_hosts")
    peace = _run(folder / "peace", settings, [], [], given.step_bound)
    chaos = _run(folder / "chaos", settings, plan, hosts, given.step_bound)
    write_outcomes(chaos.verdict, folder / "faults.jsonl")
    _write_hosts(chaos.hosts, folder / "host_faults.jsonl")
    print_tables(report, peace.verdict, chaos.verdict)
    _print_hosts(report, chaos)
    fill_report(report, peace.verdict, chaos.verdict)
    _fill(report, peace, chaos)
    return report


def _run(
    root: Path,
    settings: dict[str, Any],
    plan: Sequence[Planned],
    host_plan: Sequence[PlannedHost],
    bound_s: float,
) -> OnHosts:
    marker, authority = uuid.uuid4().hex, root.with_suffix(".authority")
    make_authority(authority)
    with (
        net(HOSTS + len(host_plan)) as made,
        TemporaryDirectory(prefix="cm-") as hook,
        cluster(made, root.with_suffix(".hosts"), authority, marker, Path(hook)) as hosts,
        launched(root, settings | _on(hosts), Path(hook), marker, made.within(0)) as run,
    ):
        steps = int(settings["run.steps"])
        striking = HostInjector(run, hosts, host_plan, steps)
        injector = Injector(run, plan, steps, Path(hook))
        ended = run_through(run, injector, bound_s, striking.step, LEFT_AFTER_S)
    verdict = judge(ended)
    deaths = unexplained(ended.applied, striking.struck, run.events)
    return OnHosts(
        dataclasses.replace(verdict, unprovoked=deaths),
        host_outcomes(striking.struck, run.events),
        striking.left,
        len(lost_for_nothing(striking.struck, run.events)),
    )


def _on(hosts: Cluster) -> dict[str, Any]:
    """Return the settings of a run on these workers."""
    return {
        "cluster.kind": "hosts",
        "cluster.workers": json.dumps([one.address for one in hosts.workers.values()]),
        "cluster.authority": hosts.authority,
        "cluster.lease_s": LEASE_S,
    }


def _print_hosts(report: Report, chaos: OnHosts) -> None:
    groups = {
        sort.value: [one for one in chaos.hosts if one.struck.planned.fault is sort]
        for sort in HostFault
    }
    rows = [[sort, *cells(found)] for sort, found in groups.items() if found]
    title = f"{len(chaos.hosts)} faults of hosts, lease {LEASE_S:g} s; seconds p50 / p95"
    report.print_table(title, HOST_COLUMNS, rows)
    print("a host that hangs cannot end itself: it was killed once the run had declared it lost")
    for one in chaos.hosts:
        if not one.healed or one.fenced_late:
            print(f"not as it must be: {_described(one)}")


def _described(one: HostOutcome) -> str:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.1f} s"

    return (
        f"{one.struck.planned.fault} of {one.struck.host} with {', '.join(one.struck.actors)}: "
        f"detected {seconds(one.detected_s)}, recovered {seconds(one.recovered_s)}, "
        f"fenced {seconds(one.fenced_s)}"
    )


def _fill(report: Report, peace: OnHosts, chaos: OnHosts) -> None:
    report.figures["host_faults"] = len(chaos.hosts)
    report.figures["host_faults_missed"] = len(chaos.missed)
    report.figures["lease_s"] = LEASE_S
    for sort in HostFault:
        found = [one for one in chaos.hosts if one.struck.planned.fault is sort]
        for name in ("detected_s", "recovered_s", "fenced_s"):
            seconds = [value for one in found if (value := getattr(one, name)) is not None]
            if seconds:
                report.figures[f"{sort.name.lower()}_{name}_max"] = round(max(seconds), 2)
    report.ratios["hosts_not_healed"] = sum(not one.healed for one in chaos.hosts)
    report.ratios["hosts_fenced_late"] = sum(one.fenced_late for one in chaos.hosts)
    report.ratios["hosts_lost_for_nothing"] = chaos.for_nothing + peace.for_nothing
    report.ratios["host_faults_missed"] = len(chaos.missed)


def _write_hosts(found: Sequence[HostOutcome], path: Path) -> None:
    """Write every host fault and its outcome, one per line."""
    path.write_text("".join(f"{json.dumps(dataclasses.asdict(one))}\n" for one in found))
