"""The chaos run on two hosts, with and without faults on actors and hosts, and its verdict.

Both runs have workers in their own network namespaces, so that they differ only by the faults.
"""

import argparse
import dataclasses
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from chaos_host_inject import HOSTS, LEASE_S, Cluster, HostInjector, cluster
from chaos_host_outcomes import (
    HostOutcome,
    cells,
    host_outcomes,
    lost_for_nothing,
    unexplained,
)
from chaos_host_schedule import HostFault, PlannedHost, host_schedule
from chaos_inject import Injector
from chaos_judge import Verdict, judge, write_outcomes
from chaos_report import fill_report, print_tables
from chaos_run import launched
from chaos_schedule import Planned, schedule
from chaos_through import run_through
from cut_net import net
from report import Report

from composer_mesh.mesh.hosts.certificates import make_authority

LEFT_AFTER_S = 30.0
COLUMNS = ("host", "faults", "detected s", "recovered s", "fenced s", "as it must be")


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
    report.print_table(title, COLUMNS, rows)
    print("a host that hangs cannot end itself: it was killed once the run had declared it lost")
    for one in chaos.hosts:
        if not one.healed or one.fenced_late:
            print(f"not as it must be: {_told(one)}")


def _told(one: HostOutcome) -> str:
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
