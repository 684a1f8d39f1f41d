"""The hosts of a run are waited for, refused, lost and replaced by the rules; no worker is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from composer_mesh.mesh.hosts.address import channel_of, process_address
from composer_mesh.mesh.hosts.agent import HostDescription
from composer_mesh.mesh.hosts.remote import HostRefused
from composer_mesh.mesh.hosts.roster import ROSTER, Record, announce, read_roster
from composer_mesh.mesh.supervision import ProcessLate
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.services.directory.control import ControlRefused
from composer_mesh.services.run import hosts as run_hosts
from composer_mesh.services.run.hosts import RunHosts

pytestmark = pytest.mark.plugins

A, B, C = "tcp://10.0.0.5:22300", "tcp://10.0.0.6:22300", "tcp://10.0.0.7:1"
GB = 1 << 30


class FakeRemote:
    """A worker that sees the files of the run, unless it is `blind`.

    The first start of its agent is `late`.
    """

    blind: ClassVar[bool] = False
    late: ClassVar[bool] = False
    all: ClassVar[list[FakeRemote]] = []

    def __init__(self, name: str, address: str, lease_s: float, note_late: Any) -> None:
        assert process_address(address) == address
        self.name, self.channel, self.lease_s = name, channel_of(address), lease_s
        self.address = address
        self.note_late = note_late
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.all.append(self)

    @property
    def known(self) -> HostDescription:
        return HostDescription(HostResources("localhost", 8, 64 * GB), "node", "python", 1, {})

    async def attach(self, deadline_s: float) -> None:
        assert deadline_s > 0
        if self.late:
            self.note_late(ProcessLate(f"{self.name}-agent", self.name, "30s", 1))

    async def ask(self, endpoint: str, *args: Any, **_: Any) -> Any:
        return await getattr(self, endpoint)(*args)

    async def sees(self, path: Path) -> str | None:
        return None if self.blind else await asyncio.to_thread(path.read_text)

    async def stacks(self, pids: list[int], native: bool) -> list[str]:
        return [f"{pid} of {self.name}, native {native}" for pid in pids]

    async def has_folder(self, _path: Path) -> bool:
        return True

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def close(self, _deadline_s: float) -> None:
        self.closed = True


class FakeMesh:
    """Knows the hosts that have joined it."""

    def __init__(self) -> None:
        self.capacity_wait_s = 0.0
        self.hosts: dict[str, FakeRemote] = {}

    def join(self, host: FakeRemote) -> None:
        self.hosts[host.name] = host


Build = Callable[..., RunHosts]


class Events(list[tuple[str, str]]):
    """What was recorded; wakes whoever waits for more."""

    def __init__(self) -> None:
        self.more = asyncio.Condition()

    async def until(self, kind: str, often: int = 1) -> None:
        """Wait until so many of a kind were recorded."""
        async with self.more, asyncio.timeout(30):
            await self.more.wait_for(lambda: [one for one, _ in self].count(kind) >= often)

    def add(self, kind: str, detail: str) -> None:
        self.append((kind, detail))
        self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        async with self.more:
            self.more.notify_all()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def build(
    tmp_path: Path, build_config: Any, monkeypatch: pytest.MonkeyPatch, events: Events
) -> Build:
    """A run on workers, with the settings of its cluster."""
    monkeypatch.setattr(run_hosts, "RemoteHost", FakeRemote)
    monkeypatch.setattr(run_hosts, "LOOK_S", 0.001)
    monkeypatch.setattr(RunHosts, "_listen", lambda *_: None)
    monkeypatch.setattr(FakeRemote, "all", [])
    monkeypatch.setattr(FakeRemote, "blind", False)

    def made(placement: dict[str, Any] | None = None, **cluster: Any) -> RunHosts:
        config = build_config(cluster=cluster, placement=placement or {})

        def record(kind: str, _actor: str, detail: str, /, **_fields: Any) -> None:
            events.add(kind, detail)

        return RunHosts(config, tmp_path, FakeMesh(), record)  # type: ignore[arg-type]

    return made


def described(count: int = 2) -> dict[str, Any]:
    return {"hosts": [{"name": "gpu", "count": count, "cores": 8, "memory_gb": 32.0}]}


def record(name: str, address: str) -> Record:
    return Record(name, process_address(address), "python", 1, "boot")


async def test_named_workers_are_called_as_the_placement_says_or_by_number(build: Build) -> None:
    hosts = build(kind="hosts", workers=[A, B], lease_s=3.0)
    await hosts.attach()
    assert [(one.name, one.channel, one.lease_s) for one in FakeRemote.all] == [
        ("host-0", A, 3.0),
        ("host-1", B, 3.0),
    ]
    assert (hosts.count, hosts.cores) == (2, 16)
    hosts = build(described(), kind="hosts", workers=[A, B])
    await hosts.attach()
    assert [one.name for one in FakeRemote.all[2:]] == ["gpu-0", "gpu-1"]
    assert hosts.names == {"tcp:10.0.0.5:22300": "gpu-0", "tcp:10.0.0.6:22300": "gpu-1"}
    await hosts.give_back()
    assert [one.closed for one in FakeRemote.all] == [False, False, True, True]


async def test_a_worker_is_attached_under_the_identity_that_its_address_names(
    build: Build, events: Events
) -> None:
    hosts = build(kind="hosts", workers=[f"gpu-a<2>@{A}", B])
    await hosts.attach()
    assert [one.address for one in FakeRemote.all] == [f"gpu-a<2>@{A}", process_address(B)]
    assert hosts.names == {"tcp:10.0.0.5:22300": "host-0", "tcp:10.0.0.6:22300": "host-1"}
    assert ("host_joined", f"host-0: {A}, node, 8 cores") in events
    await hosts.give_back()


async def test_hosts_have_the_order_of_the_config_whichever_was_attached_first(
    build: Build, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = asyncio.Event()

    async def attach(host: FakeRemote, _deadline_s: float) -> None:
        await (second.wait() if host.name == "host-0" else asyncio.sleep(0))

    monkeypatch.setattr(FakeRemote, "attach", attach)
    hosts = build(kind="hosts", workers=[A, B])
    attaching = asyncio.create_task(hosts.attach())
    await events.until("host_joined")
    second.set()
    await attaching
    assert [detail.partition(":")[0] for _, detail in events] == ["host-1", "host-0"]
    assert list(hosts.names.values()) == ["host-0", "host-1"]


async def test_a_scheduler_s_hosts_are_waited_for_until_all_have_announced_themselves(
    build: Build, tmp_path: Path
) -> None:
    hosts = build(described(), kind="slurm", attach_s=60.0)
    announce(tmp_path / ROSTER, record("gpu-1", B))
    attaching = asyncio.create_task(hosts.attach())
    await asyncio.sleep(0.05)
    assert FakeRemote.all == []
    announce(tmp_path / ROSTER, record("gpu-0", A))
    await attaching
    assert [(one.name, one.channel) for one in FakeRemote.all] == [("gpu-0", A), ("gpu-1", B)]


async def test_a_late_start_of_an_agent_is_told(
    build: Build, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRemote, "late", True)
    await build(kind="hosts", workers=[A]).attach()
    assert [event for event, _ in events] == ["start_repeated", "host_joined"]
    assert events[0][1] == "its process was not ready within 30s"


async def test_stacks_are_read_on_the_host_of_their_processes(build: Build) -> None:
    hosts = build(kind="hosts", workers=[A, B])
    with pytest.raises(ControlRefused, match="'host-0' is not a host of this run, which has none"):
        await hosts.stacks("host-0", [1], False)
    await hosts.attach()
    name = FakeRemote.all[-1].name
    assert await hosts.stacks(name, [1, 2], True) == [
        f"{pid} of {name}, native True" for pid in (1, 2)
    ]
    with pytest.raises(
        ControlRefused, match=f"'other' is not a host of this run, which has .*{name}"
    ):
        await hosts.stacks("other", [1], False)


async def test_a_host_that_never_comes_is_refused_by_name(build: Build, tmp_path: Path) -> None:
    hosts = build(described(3), kind="slurm", attach_s=0.01)
    announce(tmp_path / ROSTER, record("gpu-1", B))
    with pytest.raises(HostRefused, match=r"gpu-0, gpu-2 of 3 hosts did not announce .* 0\.01 s"):
        await hosts.attach()


async def test_a_host_without_the_files_is_refused_and_given_back(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRemote, "blind", True)
    hosts = build(kind="hosts", workers=[A])
    with pytest.raises(HostRefused, match="host-0 does not see"):
        await hosts.attach()
    assert [one.closed for one in FakeRemote.all] == [True]


async def test_a_lost_host_is_told_and_its_place_is_no_more(build: Build, events: Events) -> None:
    hosts = build(kind="hosts", workers=[A, B])
    await hosts.attach()
    placements = hosts.place()
    FakeRemote.all[1].lose("its host host-1 is lost: silence")
    await events.until("host_lost")
    assert events[-1] == ("host_lost", "its host host-1 is lost: silence")
    assert (placements.hosts, hosts.cores) == (("host-0",), 8)
    await hosts.give_back()


async def test_who_announces_itself_later_joins_also_under_the_name_of_another(
    build: Build, tmp_path: Path, events: Events
) -> None:
    hosts = build(described(), kind="slurm")
    announce(tmp_path / ROSTER, record("gpu-0", A))
    announce(tmp_path / ROSTER, record("gpu-1", B))
    await hosts.attach()
    placements = hosts.place()
    again = "tcp://10.0.0.6:22301"
    async with hosts.watched():
        announce(tmp_path / ROSTER, record("gpu-1", again))
        await events.until("host_joined", 3)
        await events.until("host_lost")
    assert set(placements.hosts) == {"gpu-0", "gpu-1"}
    old, new = FakeRemote.all[1:]
    assert old.lost.result() == f"a new worker has its name, at {again}"
    assert hosts.mesh.hosts["gpu-1"] is new  # type: ignore[comparison-overlap]
    assert [kind for kind, _ in events].count("host_joined") == 3
    await hosts.give_back()


class FailingRoster:
    """A folder on a file system that has trouble a few times; a bug comes after all of it."""

    def __init__(self, *troubles: Exception | None) -> None:
        self.troubles = list(troubles)

    def __call__(self, folder: Path) -> list[Record]:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble is not None:
            raise trouble
        return read_roster(folder)


STALE, BROKEN = OSError(116, "Stale file handle"), OSError(5, "Input/output error")


async def test_a_roster_that_cannot_be_read_is_an_event_and_is_read_again(
    build: Build, tmp_path: Path, events: Events
) -> None:
    hosts = build(described(), kind="slurm")
    announce(tmp_path / ROSTER, record("gpu-0", A))
    announce(tmp_path / ROSTER, record("gpu-1", B))
    await hosts.attach()
    hosts.place()
    hosts.read = FailingRoster(STALE, STALE, BROKEN)
    async with hosts.watched():
        announce(tmp_path / ROSTER, record("gpu-2", C))
        await events.until("host_joined", 3)
    told = [detail for kind, detail in events if kind == "roster_unreadable"]
    assert [detail.rpartition("] ")[2] for detail in told] == [STALE.strerror, BROKEN.strerror]
    await hosts.give_back()


async def test_a_host_whose_probe_cannot_be_written_is_refused_and_others_still_join(
    build: Build, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unprobed(FakeRemote):
        async def sees(self, path: Path) -> str | None:
            if self.channel == B:
                raise OSError(28, "No space left on device")
            return await super().sees(path)

    monkeypatch.setattr(run_hosts, "RemoteHost", Unprobed)
    hosts = build(kind="slurm", attach_s=60.0)
    async with hosts.watched():
        announce(tmp_path / ROSTER, record("gpu-0", B))
        await events.until("host_refused")
        announce(tmp_path / ROSTER, record("gpu-1", A))
        await events.until("host_joined")
    assert [one.closed for one in FakeRemote.all] == [True, False]
    await hosts.give_back()


async def test_a_bug_in_the_watcher_for_joining_hosts_is_an_event(
    build: Build, events: Events
) -> None:
    hosts = build(described(), kind="slurm")
    hosts.read = FailingRoster(TypeError("a bug"))
    async with hosts.watched():
        await events.until("task_failed")
    assert events == [("task_failed", "watching for hosts that join: TypeError: a bug")]
    await hosts.give_back()


async def test_joining_is_refused_where_it_could_not_work(build: Build) -> None:
    with pytest.raises(ControlRefused, match=r"cluster\.kind is 'local'"):
        await build().join(A)
    hosts = build(kind="hosts", workers=[A])
    await hosts.attach()
    for known in (A, process_address(A)):
        with pytest.raises(ControlRefused, match="on another port"):
            await hosts.join(known)
    hosts.shared_memory = True
    with pytest.raises(HostRefused, match=r"weights\.transport = 'rdma'"):
        await hosts.join(B)
    hosts.shared_memory = False
    assert await hosts.join(C) == "joined-1"
    await hosts.give_back()
