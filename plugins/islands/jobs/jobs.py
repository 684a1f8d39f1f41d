"""Islands as jobs of a cloud, which gives each a machine for as long as its command runs.

A job gets its config in an environment variable, and no file of this machine. The records of its
run come back through the store where the islands meet: the island copies them to `records/RANK/`,
and a reader copies them from there into a run directory, on which `tree`, `dashboard` and the
summary work as on any other.

`train_in_job` runs in a job: `train` with that config, and a thread that copies the records. A
cloud that announces the end of a job by SIGTERM gets a checkpoint, as from any run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.islands.jobs.ports import (
    ENDED,
    Executor,
    IslandReplica,
    IslandState,
    State,
    failure_of,
)
from composer_mesh.plugins.islands.store.opening import (
    LARGEST_OBJECT,
    ObjectStore,
    StoreUnavailable,
    open_store,
)
from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
    read_metrics,
)
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.directory.status import EVENTS_FILE, STATUS_FILE, read_status
from composer_mesh.services.launch.ports import LaunchFailed

RECORDS = (
    *(CONFIG_FILE, EVENTS_FILE, METRICS_FILE, EVALUATIONS_FILE, TIMELINE_FILE),
    *(STATUS_FILE, SUMMARY_FILE),
)
"""The files that are copied; how a run ended is in the last two, so they come last."""


class IslandRecords:
    """The records of one island, in its run directory and in the store."""

    def __init__(self, store: ObjectStore, rank: int, run: Path) -> None:
        self._store, self._folder, self._run = store, f"records/{rank}", run
        self._sent: dict[str, bytes] = {}

    def send(self) -> None:
        """Copy what has changed to the store; raises `StoreUnavailable`."""
        for name in RECORDS:
            path = self._run / name
            if path.is_file() and (data := path.read_bytes()) != self._sent.get(name):
                self._store.put(f"{self._folder}/{name}", data)
                self._sent[name] = data

    def fetch(self) -> None:
        """Copy what the store has into the run directory; raises `StoreUnavailable`."""
        for name in RECORDS:
            key = f"{self._folder}/{name}"
            size = self._store.size(key)
            if size is None:
                continue
            if size > LARGEST_OBJECT:  # a stranger may write to a store
                why = f"it has {size} bytes, above {LARGEST_OBJECT}"
                raise StoreUnavailable("copy", key, why)
            data = self._store.get(key)
            path = self._run / name
            if data is not None and not (path.is_file() and path.read_bytes() == data):
                self._run.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)

    def forget(self) -> None:
        """Remove the records of an earlier run from the store; raises `StoreUnavailable`."""
        for name in RECORDS:
            self._store.delete(f"{self._folder}/{name}")


@contextmanager
def refusals(cloud: str, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a cloud's client into `LaunchFailed`."""
    try:
        yield
    except errors as error:
        first = next(iter(str(error).strip().splitlines()), "") or repr(error)
        raise LaunchFailed(f"{cloud} did not {what}: {first}") from error


JOBS_FILE = "jobs.json"
MOST_BYTES = 1 << 20
CONFIG = "COMPOSER_MESH_ISLAND_CONFIG"
"""The environment variable with an island's config, as TOML."""
RUNS = "~/composer-mesh-runs"
MOUNTED_RUNS = "/runs"
LOG_LINES = 3


@dataclass(frozen=True)
class JobOptions:
    """What jobs are made of: image, hardware, names of secret variables, a volume for the runs."""

    image: str
    hardware: str | None = None
    secrets: tuple[str, ...] = ()
    volume: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class IslandJob:
    """One job. The values of `secrets` are in this process's environment, and in no output."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    options: JobOptions
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


class JobCloud(Protocol):
    """Where jobs run; every method raises `LaunchFailed` where the cloud refuses."""

    name: str

    def check(self, options: JobOptions) -> None:
        """Refuse options that it does not serve; asks nobody."""

    def connect(self) -> None:
        """Check the account."""

    def describe(self, job: IslandJob) -> Mapping[str, object]:
        """Return the call that `submit` would make; without values of secrets."""

    def submit(self, job: IslandJob) -> str:
        """Start a job. Waits until it is accepted; returns its identity."""

    def state(self, job: str) -> tuple[State, str]:
        """Return the state of a job, and what the cloud says of it."""

    def last_lines(self, job: str, count: int) -> list[str]:
        """Return the end of what a job has printed."""

    def cancel(self, job: str) -> None:
        """End a job that has not ended."""


def job_of(
    replica: IslandReplica, root: Path, options: JobOptions, secrets: Mapping[str, str]
) -> IslandJob:
    """Return the job of an island; paths of its config are those of the image."""
    runs = MOUNTED_RUNS if options.volume else RUNS
    output = f"{runs}/{root.name}/island-{replica.rank}"
    python = replica.config.cluster.python or "python"
    return IslandJob(
        f"{root.name}-{replica.rank}",
        tuple(python_module("composer_mesh", "island-job", "--output", output, python=python)),
        {CONFIG: dump_toml(replica.config)},
        options,
        secrets,
    )


class JobExecutor(Executor):
    """Starts each island as a job, and reads its records from the store."""

    def __init__(
        self,
        cloud: JobCloud,
        root: Path,
        options: JobOptions,
        secrets: Mapping[str, str],
    ) -> None:
        self._cloud, self._root = cloud, root
        self._options, self._secrets = options, secrets
        self._store: ObjectStore | None = None
        self._jobs: dict[int, tuple[IslandReplica, str]] = {}
        self._known: dict[int, State] = {}

    def dry_run(self, replicas: Sequence[IslandReplica]) -> None:
        """Print the call for each island; ask and change nothing."""
        for one in replicas:
            job = job_of(one, self._root, self._options, self._secrets)
            sys.stdout.write(f"# island {one.rank}\n")
            sys.stdout.write(json.dumps(self._cloud.describe(job), indent=1) + "\n")

    def connect(self, store: ObjectStore | None) -> None:
        if store is None:
            raise LaunchFailed("jobs record in a store, and there is none: give --store")
        self._store = store
        self._cloud.connect()

    def launch_replicas(self, replicas: Sequence[IslandReplica]) -> None:
        self._refuse_the_living(replicas)
        for one in replicas:
            if not one.resume:
                self._records(one).forget()
        try:
            for one in replicas:
                job = job_of(one, self._root, self._options, self._secrets)
                self._jobs[one.rank] = (one, self._cloud.submit(job))
                self._write()
        except BaseException as error:
            try:
                self.cancel(0.0)
            except LaunchFailed as failed:
                raise LaunchFailed(f"{error}; {failed}") from error
            raise

    def poll(self) -> list[IslandState]:
        return [self._state(*self._jobs[rank]) for rank in sorted(self._jobs)]

    def cancel(self, grace_s: float) -> None:
        """End the jobs now, whatever `grace_s` is: a cloud gives no time for a checkpoint."""
        del grace_s
        left = []
        for _, job in self._jobs.values():
            try:
                if self._cloud.state(job)[0] not in ENDED:
                    self._cloud.cancel(job)
            except LaunchFailed as failed:
                left.append(f"job {job} may continue: {failed}")
        if left:
            raise LaunchFailed("; ".join(left))

    def _state(self, one: IslandReplica, job: str) -> IslandState:
        try:
            state, described = self._cloud.state(job)
        except LaunchFailed as failed:  # its job continues, and the next poll asks again
            return IslandState(one.rank, self._known.get(one.rank, "waiting"), cause=str(failed))
        self._known[one.rank] = state
        unread = ""
        try:
            self._records(one).fetch()
        except StoreUnavailable as unavailable:  # the next poll reads them, if there is one
            unread = str(unavailable)
        step = len(read_metrics(one.output / METRICS_FILE))
        if state == "finished" and not unread and not _has_finished(one):
            state, described = "failed", "its job has ended, but no run has finished in it"
        if state == "failed":
            said = (described, self._said_last(job))
            cause = failure_of(one.output) or ": ".join(filter(None, said))
        else:
            cause = unread or ("" if state in ENDED else described)
        return IslandState(one.rank, state, step, cause)

    def _records(self, one: IslandReplica) -> IslandRecords:
        if self._store is None:
            raise RuntimeError("connect comes first")
        return IslandRecords(self._store, one.rank, one.output)

    def _said_last(self, job: str) -> str:
        try:
            return " / ".join(self._cloud.last_lines(job, LOG_LINES))
        except LaunchFailed as failed:
            return str(failed)

    def _refuse_the_living(self, replicas: Sequence[IslandReplica]) -> None:
        """Raise `LaunchFailed` where an earlier job of one of the islands has not ended."""
        known = self._read()
        for one in replicas:
            job = known.get(one.rank)
            if job is not None and not self._has_ended(job):
                raise LaunchFailed(
                    f"job {job} of island {one.rank} has not ended: wait for it, or cancel it at "
                    f"{self._cloud.name} first"
                )

    def _has_ended(self, job: str) -> bool:
        try:
            return self._cloud.state(job)[0] in ENDED
        except LaunchFailed as failed:
            raise LaunchFailed(
                f"{failed}; it is in {self._root / JOBS_FILE}, which may be moved away once none "
                "of its jobs remains"
            ) from failed

    def _read(self) -> dict[int, str]:
        path = self._root / JOBS_FILE
        try:
            about = json.loads(read_regular(path, MOST_BYTES))
            return {int(rank): str(job) for rank, job in about[self._cloud.name].items()}
        except FileNotFoundError:
            return {}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"{path} does not say which jobs of {self._cloud.name} were started ({error!r}): "
                "move it away once none of them remains"
            ) from None

    def _write(self) -> None:
        jobs = self._read() | {rank: job for rank, (_, job) in self._jobs.items()}
        text = json.dumps({self._cloud.name: {str(rank): jobs[rank] for rank in sorted(jobs)}})
        write_whole(self._root / JOBS_FILE, (text + "\n").encode())


def _has_finished(one: IslandReplica) -> bool:
    """Whether an island's records say so; a cloud may report a start that failed as an end."""
    status = read_status(one.output)
    return status is not None and status.state == "finished"


SEND_S = 15.0
"""Seconds between two copies of the records."""


def train_in_job(output: Path, train: Callable[[Path], int]) -> int:
    """Train the island with the config of the variable CONFIG; return the status of `train`.

    `train` gets the config as a file. Raises `UsageError` without the variable.
    """
    text = os.environ.pop(CONFIG, None)
    if text is None:
        raise UsageError(f"{CONFIG} is not set: `islands --on` starts jobs that have it")
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.parent / f"{output.name}.toml"
    write_whole(file, text.encode())
    islands = load_config(file).islands
    if islands.store is None:
        raise UsageError(f"the config in {CONFIG} has no islands.store: set it")
    store = open_store(islands.store, islands.request_s)
    copies = _Copies(IslandRecords(store, islands.rank, output))
    try:
        return train(file)
    finally:
        copies.close(islands.request_s)


class _Copies:
    """Copies the records every SEND_S seconds; what could not be copied is copied next time."""

    def __init__(self, records: IslandRecords) -> None:
        self._records, self._closed = records, threading.Event()
        self._thread = threading.Thread(target=self._copy, name="records", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Copy the rest; gives up after `within_s`."""
        self._closed.set()
        self._thread.join()
        until = time.monotonic() + within_s
        while not self._sent() and time.monotonic() < until:
            time.sleep(1.0)

    def _copy(self) -> None:
        while not self._closed.wait(SEND_S):
            self._sent()

    def _sent(self) -> bool:
        try:
            self._records.send()
        except (StoreUnavailable, OSError) as failed:
            sys.stderr.write(f"composer-mesh: the run's records are not copied: {failed}\n")
            return False
        return True
