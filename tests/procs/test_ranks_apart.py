"""Ranks that are told different hosts meet on an address and train what one rank trains alone."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import learning
import pytest
from surroundings import NEEDS_IPV6
from torch import distributed as dist

from composer_mesh.actors.models.ranks import Ranks, open_store
from composer_mesh.mesh.process_resources import ADDRESS
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.packing import PackedBatch
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.rank_processes import TrainerRanks

HOSTS = {"a": "127.0.0.1", "b": "127.0.0.2"}


class TwoHosts:
    """Two hosts on this machine, each with a loopback address for its own."""

    capacity_wait_s = 0.0

    def __init__(self, host: MeshHost, near: bool = False) -> None:
        self._host, self._near = host, near
        self.supervisor = host.supervisor
        self.where: list[str] = []

    async def spawn(self, *args: Any, on: str, env: Any, **kwargs: Any) -> Any:
        self.where.append(on)
        assert ("GLOO_SOCKET_IFNAME" in env) == self._near, "each host finds its own"
        return await self._host.spawn(*args, env={**env, ADDRESS: HOSTS[on]}, **kwargs)

    async def stop(self, actor: Any) -> None:
        await self._host.stop(actor)


async def test_ranks_of_two_hosts_take_the_step_that_one_rank_takes(
    host: MeshHost, tmp_path: Path
) -> None:
    steps = learning.batches(learning.write_policy(tmp_path / "policy"))[:2]
    settings = learning.config(learning.SHARDED)
    two = TwoHosts(host)
    ranks = TrainerRanks(settings, two, lambda rank: ProcessPlacement("ab"[rank], {}))  # type: ignore[arg-type]
    await ranks.start()
    assert two.where == ["a", "b"]
    assert await ranks.load(tmp_path / "policy") == 0
    alone = learning.five_steps(learning.config(), tmp_path / "policy", Ranks(), steps)
    for batch, expected in zip(steps, alone["metrics"], strict=True):
        packed = await PackedBatch.of(batch)
        replies = await asyncio.gather(*(one.call("train", packed) for one in ranks.all))
        for reply in replies:
            for name in ("loss/total", "policy/grad_norm"):
                assert reply.metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


async def test_ranks_of_one_other_host_meet_there(host: MeshHost, tmp_path: Path) -> None:
    learning.write_policy(tmp_path / "policy")
    alike = TwoHosts(host, near=True)
    ranks = TrainerRanks(
        learning.config(learning.SHARDED), alike, lambda _: ProcessPlacement("a", {})
    )  # type: ignore[arg-type]
    await ranks.start()
    assert await ranks.load(tmp_path / "policy") == 0


@pytest.mark.parametrize("address", ["127.0.0.3", pytest.param("::1", marks=NEEDS_IPV6)])
def test_ranks_meet_on_the_address_of_their_host_and_on_no_other(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS, address)
    rendezvous, store = open_store(deadline_s=60)
    assert rendezvous.host == address
    assert [found for _, found in listening() if found == rendezvous.port] == [rendezvous.port]
    assert (_packed(address), rendezvous.port) in listening()
    other = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    other.set("from", "b")
    assert store.get("from") == b"b"


def _packed(address: str) -> str:
    """An address as `/proc/net/tcp` writes it."""
    if ":" not in address:
        return f"{struct.unpack('=I', socket.inet_aton(address))[0]:08X}"
    words = struct.unpack("=4I", socket.inet_pton(socket.AF_INET6, address))
    return "".join(f"{word:08X}" for word in words)


def listening() -> list[tuple[str, int]]:
    """Every TCP address and port of this machine on which this process listens."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(descriptor.readlink()))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
                address, _, port = parts[1].partition(":")
                found.append((address, int(port, 16)))
    return found
