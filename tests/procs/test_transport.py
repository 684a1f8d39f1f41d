"""One-sided reads between processes: bytes and weights arrive whole, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_run import GONE_DEADLINE_S
from tensor_actors import BytesActor, TiedModel, WeightsActor

from composer_mesh.configs.weights import WeightTransport
from composer_mesh.mesh.processes import wait_gone
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor, while_alive
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.transport import SendBuffer, TransportError, read
from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import PublisherGone, TornWeights, WeightsMismatch
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.mesh.weights.remote_transports import why_no_torchstore
from composer_mesh.mesh.weights.transports import MEMORY_NAME


async def test_a_read_equals_what_was_written_also_after_growth(host: MeshHost) -> None:
    writer, reader = await asyncio.gather(
        host.spawn("bytes-0", BytesActor, 64), host.spawn("bytes-1", BytesActor)
    )
    for tensor in (
        torch.arange(5, dtype=torch.int64),
        torch.randn(3, 4),
        torch.randn(300, 200, dtype=torch.bfloat16),
        torch.zeros(0, 7),
        torch.tensor(2.5),
    ):
        handle = await writer.call("offer", tensor)
        assert torch.equal(await reader.call("fetch", handle), tensor)
        assert torch.equal(await reader.call("fetch", handle, torch.empty_like(tensor)), tensor)
    with pytest.raises(TransportError, match=r"allocate out from the handle's dtype and shape"):
        await reader.call("fetch", handle, torch.zeros(3))


async def test_a_buffer_is_registered_once_for_payloads_of_like_size(host: MeshHost) -> None:
    writer = await host.spawn("bytes-0", BytesActor, 1 << 16)
    for size in (3000, 3001, 60_000, 65_536, 50_000):
        await writer.call("offer", torch.ones(size, dtype=torch.uint8))
    assert await writer.call("registrations") == 2


TRANSPORTS: tuple[WeightTransport, ...] = (
    *("shm", "rdma", "disk"),
    *(("torchstore",) if why_no_torchstore() is None else ()),
)
"""torchstore is an extra that CI does not install."""


async def test_weights_travel_with_their_version_by_every_transport(
    host: MeshHost, tmp_path: Path
) -> None:
    trainer, generator, other = await asyncio.gather(
        host.spawn("trainer", WeightsActor),
        host.spawn("generator-0", WeightsActor),
        host.spawn("generator-1", WeightsActor, 4),
    )
    for name in TRANSPORTS:
        transport = Transport(name, folder=tmp_path)
        handles = [await trainer.call("publish", n, n / 4, transport) for n in (1, 2)]
        for handle in handles:  # two memories: the version before the newest is still whole
            values = await generator.call("pull", handle)
            assert all(value == [handle.version / 4] for value in values.values())
            assert (await generator.call("describe"))["policy_version"] == handle.version
        assert await generator.call("tied")
        await trainer.call("publish", 3, 0.75, transport)
        with pytest.raises(TornWeights, match="version 1 but read version stamps"):
            await generator.call("pull", handles[0])
        with pytest.raises(WeightsMismatch, match=r"embed\.weight is published as"):
            await other.call("pull", handles[1])
    await trainer.call("close")
    assert names_in(tmp_path) == set()


def names_in(folder: Path) -> set[str]:
    """What of ours is in a folder."""
    return {one.name for one in folder.iterdir() if "composer-mesh-weights" in one.name}


def mapped(actor: SpawnedActor) -> int:
    """How many publishers' memories a process has mapped."""
    return Path(f"/proc/{actor.pid}/maps").read_text().count(f"/memfd:{MEMORY_NAME}")


async def test_a_killed_publisher_leaves_nothing_and_nobody_waits_for_it(host: MeshHost) -> None:
    trainer, generator, late = await asyncio.gather(
        *(host.spawn(name, WeightsActor) for name in ("trainer", "generator-0", "generator-1"))
    )
    before = names_in(Path("/dev/shm"))
    shared = await trainer.call("publish", 1, 0.25, Transport("shm"))
    read = await trainer.call("publish", 2, 0.5, Transport("rdma"))
    await generator.call("pull", shared)
    os.kill(trainer.pid, signal.SIGKILL)
    assert await wait_gone(trainer.pid, GONE_DEADLINE_S)
    assert names_in(Path("/dev/shm")) <= before
    values = await generator.call("pull", shared)  # it has the memory, which outlives its maker
    assert values["embed.weight"] == [0.25]
    with pytest.raises(PublisherGone, match="pull from the publisher that took its place"):
        await late.call("pull", shared)
    with pytest.raises(ActorDied, match="trainer died"):
        await while_alive(trainer, late.call("pull", read))
    successor = await host.spawn("trainer.2", WeightsActor)
    assert [mapped(generator), mapped(late)] == [1, 0]
    await generator.call("pull", await successor.call("publish", 3, 0.75, Transport("shm")))
    assert mapped(generator) == 1


async def test_the_front_of_what_is_read_one_sidedly_is_read_again_in_the_end(
    host: MeshHost,
) -> None:
    assert host.here.mesh is not None
    publisher = WeightPublisher(TiedModel().state_dict, transport=Transport("rdma"))
    handles = [await publisher.publish(version) for version in (1, 2)]
    assert (await WeightReceiver().receive(handles[0])).version == 1
    [part], [newer] = (handle.parts for handle in handles)
    overtaken = replace(part, offer=replace(part.offer, front=newer.offer.front))
    with pytest.raises(TornWeights, match="version 1 but read version stamps 2 and 1"):
        await WeightReceiver().receive(replace(handles[0], parts=(overtaken,)))
    assert publisher._sender is not None
    publisher._sender.memory(1)[-16:] = 0
    with pytest.raises(TornWeights, match="version 2 but read version stamps 2 and 0"):
        await WeightReceiver().receive(handles[1])
    await publisher.close()


async def test_a_closed_buffer_can_no_longer_be_read(host: MeshHost) -> None:
    assert host.here.mesh is not None
    buffer = SendBuffer(1024)
    handle = await buffer.write(b"abc")
    assert bytes((await read(handle)).numpy()) == b"abc"
    await buffer.close()
    with pytest.raises(Exception, match="not found"):
        await read(handle)
