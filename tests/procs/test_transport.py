"""One-sided reads between processes: bytes and weights arrive whole, or not at all."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tensor_actors import BytesActor, TiedModel, WeightsActor

from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.transport import SendBuffer, TransportError, read
from composer_mesh.mesh.weights.errors import TornWeights, WeightsMismatch
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver


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


async def test_weights_travel_with_their_version(host: MeshHost) -> None:
    trainer, generator = await asyncio.gather(
        host.spawn("trainer", WeightsActor), host.spawn("generator-0", WeightsActor)
    )
    handles = [await trainer.call("publish", version, version / 4) for version in (1, 2)]
    for handle in handles:  # two buffers: the version before the newest is still whole
        values = await generator.call("pull", handle)
        assert all(value == [handle.version / 4] for value in values.values())
        assert (await generator.call("describe"))["policy_version"] == handle.version
    assert await generator.call("tied")
    await trainer.call("publish", 3, 0.75)
    with pytest.raises(TornWeights, match="version 1 but read marks 3 and 3"):
        await generator.call("pull", handles[0])
    other = await host.spawn("generator-1", WeightsActor, 4)
    with pytest.raises(WeightsMismatch, match=r"embed\.weight is published as"):
        await other.call("pull", handles[1])


async def test_a_torn_mark_in_front_or_behind_is_refused(host: MeshHost) -> None:
    assert host.mesh is not None
    publisher = WeightPublisher(TiedModel())
    handle = await publisher.publish(7)
    receiver = WeightReceiver()
    assert (await receiver.receive(handle)).version == 7
    memory = publisher._buffers[0].bytes
    for mark in (memory[:8], memory[-8:]):
        kept = mark.clone()
        mark.fill_(0)
        with pytest.raises(TornWeights, match="version 7 but read marks"):
            await receiver.receive(handle)
        mark.copy_(kept)
    await publisher.close()


async def test_a_closed_buffer_can_no_longer_be_read(host: MeshHost) -> None:
    assert host.mesh is not None
    buffer = SendBuffer(1024)
    handle = await buffer.write(b"abc")
    assert bytes((await read(handle)).numpy()) == b"abc"
    await buffer.close()
    with pytest.raises(TransportError, match="never written"):
        buffer.handle()
    with pytest.raises(Exception, match="not found"):
        await read(handle)
