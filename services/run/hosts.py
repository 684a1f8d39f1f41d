"""The hosts of a run: waits for them, attaches and releases them, watches losses and joins.

`placements` places processes, and an actor's owner handles the loss of its host. A run on this
machine alone has no hosts here.
"""

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch.actor import enable_transport

from composer_mesh.configs.hub import ModelSource
from composer_mesh.configs.paths import ids_in
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.hosts import address as addresses
from composer_mesh.mesh.hosts.certificates import tls_environment
from composer_mesh.mesh.hosts.host import is_lost
from composer_mesh.mesh.hosts.remote import HostRefused, RemoteHost
from composer_mesh.mesh.hosts.roster import ROSTER, Record, read_roster
from composer_mesh.mesh.machine import NAME
from composer_mesh.mesh.private_folder import private_folder
from composer_mesh.mesh.process_resources import ADDRESS
from composer_mesh.mesh.pyspy import StackDump
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, ProcessLate, Recorder
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, together
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.hub import cache_of
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.services.directory.control import ControlRefused
from composer_mesh.services.launch.workers import AUTHORITY
from composer_mesh.services.pool.process_placement import ProcessPlacements

LOOPBACK = "127.0.0.1"
"""Address of the run's admin server, which uses the same certificate."""
LOOK_S = 1.0
GIVE_BACK_S = 5.0
STACKS_S = 90.0
DOWNLOAD_S = 86_400.0
"""Longest download of a model, which ends by itself where nothing arrives."""
JOIN_S = 60.0
"""Longest wait for a worker that joins a running run."""


@dataclass
class RunHosts:
    """The workers of one run; a run without any uses this machine."""

    config: Config
    root: Path
    mesh: MeshHost
    record: Recorder
    placements: ProcessPlacements | None = None
    read: Callable[[Path], list[Record]] = read_roster
    """Reads the roster of announced workers."""
    shared_memory: bool = False
    """Whether weights use the shared memory of one host, so that no second host may join."""
    _own: str = ""
    _all: list[RemoteHost] = field(default_factory=list)
    _attached: dict[str, RemoteHost] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _watching: BackgroundTasks = field(init=False)
    _keys: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watching = BackgroundTasks(recorded_by(self.record))

    @property
    def count(self) -> int | None:
        """Number of attached hosts; None in a run without workers."""
        return len(self._attached) or None

    @property
    def cores(self) -> int | None:
        """Cores of all live hosts; None in a run without workers."""
        there = (one for one in self._attached.values() if not is_lost(one))
        return sum(one.known.machine.cores for one in there) or None

    @property
    def names(self) -> Mapping[str, str]:
        """Host names by their Monarch address, including this machine."""
        own = {_as_monarch_says(self._own): NAME} if self._own else {}
        attached = self._attached.values()
        return own | {_as_monarch_says(one.channel): one.name for one in attached}

    async def attach(self) -> None:
        """Attach every worker. Waits for all; raises `HostRefused` with the host and the repair.

        No process of the run is started before all are attached.
        """
        workers = await self._workers()
        self.mesh.capacity_wait_s = self.config.cluster.attach_s
        self._listen(workers[0][1])
        await together(*(self._attach(name, address) for name, address in workers))
        # In their own order, whichever was first: processes are placed by it.
        self._attached = {name: self._attached[name] for name, _ in workers}

    def place(self) -> ProcessPlacements:
        """Place the run on its attached hosts."""
        there = [_machine(one) for one in self._attached.values()]
        self.placements = ProcessPlacements.of(self.config, there or None)
        return self.placements

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Attach workers that announce themselves while the block runs."""
        if not self.config.cluster.remote:
            yield
            return
        joining = self._watching.start("watching for hosts that join", self._watch_roster())
        try:
            yield
        finally:
            await cancel_and_wait([joining])

    async def join(self, address: str) -> str:
        """Attach another worker, for `composer-mesh join`, and return its name."""
        if not self.config.cluster.remote:
            raise ControlRefused(
                "cluster.kind is 'local', so this run has no workers: start it with another kind"
            )
        address = addresses.process_address(address)
        if address in self._used:
            raise ControlRefused(
                f"{addresses.channel_of(address)} has been part of this run before, and Monarch "
                "attaches to an address once: start the worker on another port"
            )
        number = len(self._used)
        name = f"joined-{number}"
        await self._attach(name, address)
        return name

    async def stacks(self, host: str, pids: Sequence[int], native: bool) -> list[StackDump]:
        """Return the Python stacks of processes on an attached host, or why there are none."""
        if host not in self._attached:
            known = ", ".join(self._attached) or "none besides this machine"
            raise ControlRefused(f"{host!r} is not a host of this run, which has {known}")
        agent = self._attached[host]
        found: list[StackDump] = await agent.ask("stacks", list(pids), native, deadline_s=STACKS_S)
        return found

    async def give_back(self) -> None:
        """End the workers. Call it when no process of the run is left on them."""
        await self._watching.close()
        await asyncio.gather(*(one.close(GIVE_BACK_S) for one in self._all))
        for keys in self._keys:
            keys.cleanup()

    def _listen(self, first: str) -> None:
        """Listen for workers at one address. Must run before Monarch starts in this process."""
        cluster = self.config.cluster
        scheme, towards, _ = addresses.split(first)
        own = cluster.address or addresses.join(
            scheme, addresses.own_address(scheme, cluster.subnets, towards), 0
        )
        addresses.check_listen(own, cluster.subnets)
        _, host, port = addresses.split(own)
        if scheme == "tls":
            # Processes of this machine use the key too, until they end.
            keys = tempfile.TemporaryDirectory(prefix="tls-", dir=private_folder())
            self._keys.append(keys)
            authority = cluster.authority or self.root / AUTHORITY
            os.environ.update(tls_environment(authority, Path(keys.name), [host, LOOPBACK]))
            reload_config_from_env()  # Monarch read it when it was imported
        os.environ[ADDRESS] = host
        self._own = addresses.join(scheme, host, port or addresses.free_port(host))
        enable_transport(self._own)

    async def _attach(self, name: str, address: str) -> None:
        cluster = self.config.cluster
        if self.shared_memory and self.mesh.hosts:
            raise HostRefused(
                f"{name} cannot join: the run began on one host, so its weights travel in "
                "the memory of that host: resume it with weights.transport = 'rdma'"
            )
        host = RemoteHost(name, address, cluster.lease_s, self._note_late)
        self._used.add(address)
        self._all.append(host)
        try:
            await host.attach(cluster.attach_s if self.placements is None else JOIN_S)
            await self._check_files(host)
        except (MeshError, OSError):
            await host.close(GIVE_BACK_S)
            raise
        self._attached[name] = host
        self.mesh.join(host)
        if self.placements is not None:
            self.placements.join(_machine(host))
        about = host.known
        detail = f"{host.channel}, {about.hostname}, {about.machine.cores} cores"
        self.record("host_joined", "", f"{name}: {detail}", host=name)
        self._watching.start(f"waiting for the end of {name}", self._until_lost(host))

    def _note_late(self, late: ProcessLate) -> None:
        self.record("start_repeated", late.actor, late.why_repeated, host=late.host)

    async def _until_lost(self, host: RemoteHost) -> None:
        assert host.lost is not None
        reason = await asyncio.shield(host.lost)
        self._leave(host)
        self.record("host_lost", "", reason, host=host.name)

    def _leave(self, host: RemoteHost) -> None:
        """Remove the host from the placement, unless another host has its name by now."""
        if self.placements is not None and self._attached.get(host.name) is host:
            self.placements.lose(host.name)

    async def _watch_roster(self) -> None:
        """Attach workers that announce themselves during the run.

        An unreadable roster is recorded once per reason and read again.
        """
        refused: set[str] = set()
        trouble = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                found = await asyncio.to_thread(self.read, self.root / ROSTER)
            except OSError as error:
                if cause_of(error) != trouble:
                    trouble = cause_of(error)
                    detail = f"hosts that join are not seen until it can be: {trouble}"
                    self.record("roster_unreadable", "", detail)
                continue
            trouble = ""
            for one in found:
                if one.address not in self._used | refused:
                    await self._attach_announced(one, refused)

    async def _attach_announced(self, one: Record, refused: set[str]) -> None:
        """Attach a worker, replacing one of the same name; record a refusal."""
        if (old := self._attached.get(one.name)) is not None:
            old.lose(f"a new worker has its name, at {addresses.channel_of(one.address)}")
            self._leave(old)
        try:
            await self._attach(one.name, one.address)
        except (MeshError, ValueError, OSError) as error:
            refused.add(one.address)
            self.record("host_refused", "", str(error), host=one.name)

    async def _workers(self) -> list[tuple[str, str]]:
        """Return name and process address of the configured workers, or of all on the roster.

        Waits for them.
        """
        cluster = self.config.cluster
        names = [host.name for host in described_hosts(self.config.placement)]
        if cluster.kind == "hosts":
            names = names or [f"host-{number}" for number in range(len(cluster.workers))]
            return list(zip(names, map(addresses.process_address, cluster.workers), strict=True))
        end = asyncio.get_running_loop().time() + cluster.attach_s
        roster = self.root / ROSTER
        while True:
            found = {one.name: one for one in await asyncio.to_thread(self.read, roster)}
            missing = [name for name in names if name not in found]
            if not missing:
                return [(name, found[name].address) for name in names]
            if asyncio.get_running_loop().time() > end:
                raise HostRefused(
                    f"{', '.join(missing)} of {len(names)} hosts did not announce themselves in "
                    f"{roster} within {cluster.attach_s:g} s: look at the logs of their workers, "
                    "or raise cluster.attach_s"
                )
            await asyncio.sleep(LOOK_S)

    async def _check_files(self, host: RemoteHost) -> None:
        """Refuse a host without the run's files under the same path; let it download models."""
        probe, word = self.root / f".probe-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        probe.write_text(word)
        try:
            seen = await host.ask("sees", probe.absolute())
        finally:
            with suppress(OSError):
                probe.unlink()
        if seen != word:
            raise HostRefused(
                f"{host.name} does not see {probe.parent.absolute()}, which must be on a file "
                "system that all hosts share, under the same path: choose another --output"
            )
        if not await host.ask("has_folder", Path.cwd()):
            raise HostRefused(
                f"{host.name} has no folder {Path.cwd()}, from which the run was started: start it "
                "from one that all hosts share"
            )
        for key, section, named in ids_in(self.config):
            if isinstance(section, ModelSource) and not named.part:
                cache = cache_of(section.folder_of(named.repo))
                wanted = (named, key, cache)
                if failed := await host.ask("fetch_model", *wanted, deadline_s=DOWNLOAD_S):
                    raise HostRefused(f"{host.name}: {failed}")


def _machine(host: RemoteHost) -> HostResources:
    return replace(host.known.machine, name=host.name)


def _as_monarch_says(address: str) -> str:
    """Return the address in Monarch's form: `tls:10.0.0.5:22300` for `tls://10.0.0.5:22300`."""
    return address.replace("://", ":", 1)
