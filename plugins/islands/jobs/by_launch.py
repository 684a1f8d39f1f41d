"""Islands as launched runs: on this machine, on hosts, by Slurm or Kubernetes.

Each island has its own controller, which `composer-mesh launch` would start in the same way; so
`stop`, `tree`, `events` and `launch --resume` work on it as on any run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.plugins.islands.jobs.ports import (
    Executor,
    IslandReplica,
    IslandState,
    State,
    failure_of,
)
from composer_mesh.plugins.islands.store.opening import ObjectStore
from composer_mesh.services.directory.report import METRICS_FILE, read_metrics
from composer_mesh.services.directory.resume import LAUNCH_FILE
from composer_mesh.services.directory.status import STATUS_FILE, read_status
from composer_mesh.services.launch.command import print_plan, submit
from composer_mesh.services.launch.handle import is_newer
from composer_mesh.services.launch.ports import Handle, Launcher, Order, Plan, launcher_of
from composer_mesh.services.launch.workers import with_config

LOG_LINES = 3


class LaunchExecutor(Executor):
    """Starts each island by the launcher of its `cluster.kind`."""

    def __init__(self, launcher: Callable[[IslandReplica], Launcher] | None = None) -> None:
        self._launcher = launcher or (lambda one: launcher_of(one.config.cluster.kind))
        self._launched: list[tuple[IslandReplica, Launcher, Handle]] = []

    def plans(self, replicas: Sequence[IslandReplica]) -> Iterator[tuple[Order, Plan]]:
        """Yield exactly what `launch_replicas` would do for each island; changes nothing."""
        for one in replicas:
            order = order_of(one)
            yield order, with_config(order, self._launcher(one).plan(order))

    def dry_run(self, replicas: Sequence[IslandReplica]) -> None:
        """Print every file and command; change nothing."""
        for one, (order, plan) in zip(replicas, self.plans(replicas), strict=True):
            sys.stdout.write(f"# island {one.rank}\n")
            print_plan(order, plan)

    def connect(self, store: ObjectStore | None) -> None:
        """A launcher checks what it needs when it plans."""

    def launch_replicas(self, replicas: Sequence[IslandReplica]) -> None:
        plans = list(self.plans(replicas))
        try:
            for one, (order, plan) in zip(replicas, plans, strict=True):
                launcher = self._launcher(one)
                self._launched.append((one, launcher, submit(launcher, order, plan, named=True)))
        except BaseException:
            self.cancel(0.0)
            raise

    def poll(self) -> list[IslandState]:
        return [_state(*launched) for launched in self._launched]

    def cancel(self, grace_s: float) -> None:
        living = [one for one in self._launched if not _state(*one).ended]
        if living:
            with ThreadPoolExecutor(len(living)) as pool:
                list(pool.map(lambda one: one[1].stop(one[2], grace_s), living))


def order_of(one: IslandReplica) -> Order:
    """Return the launch order of an island."""
    config = one.config
    return Order(
        with_whole_paths(config),
        tuple(described_hosts(config.placement)),
        one.output,
        Path.cwd(),
        config.cluster.python or sys.executable,
        one.resume,
    )


def _state(one: IslandReplica, launcher: Launcher, handle: Handle) -> IslandState:
    word, described = launcher.state(handle)
    step = len(read_metrics(one.output / METRICS_FILE))
    if word in ("waiting", "running"):
        return IslandState(one.rank, "waiting" if word == "waiting" else "running", step)
    if word == "unknown":
        return IslandState(one.rank, "running", step, described)
    ended = _ended(one.output)
    cause = _cause(one, handle) or described if ended == "failed" else ""
    return IslandState(one.rank, ended, step, cause)


def _ended(output: Path) -> State:
    """Return how a run has ended that this launch has started; if killed, it says running."""
    status = read_status(output)
    if status is None or not is_newer(output / STATUS_FILE, output / LAUNCH_FILE):
        return "failed"
    if status.state == "finished":
        return "finished"
    return "stopped" if status.state == "stopped" else "failed"


def _cause(one: IslandReplica, handle: Handle) -> str:
    """Return why an island failed: its own event, or else the end of its log."""
    if failure := failure_of(one.output):
        return failure
    if handle.log is not None and handle.log.is_file():
        said = handle.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return " / ".join(said) or f"it said nothing in {shlex.quote(str(handle.log))}"
    return ""
