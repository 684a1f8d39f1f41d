"""Versions on their way, inside one process: whole or not at all, by whatever carries them.

What each carrier does for itself: shared memory without a name, files that are few and whole.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_source import Source, numbers

from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import (
    PublisherGone,
    PullAbandoned,
    TornWeights,
    TransportUnavailable,
    WeightsMismatch,
    WrongChecksum,
)
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.mesh.weights.transports import (
    ShmReceiver,
    ShmSender,
    _copy,
    check_stamps,
    stamp,
    unstamp,
)


@pytest.fixture(params=["shm", "disk"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    """Those that need no Monarch; the others are tested between processes."""
    return Transport(request.param, folder=tmp_path / "weights")


async def test_the_newest_two_versions_can_be_had_and_no_older_one(transport: Transport) -> None:
    source, receiver = Source(transport), WeightReceiver()
    handles = [await source.publish(version) for version in (1, 2)]
    for handle in handles:
        staged = await receiver.receive(handle)
        assert staged.version == handle.version
        assert numbers(staged) == {handle.version}
    await source.publish(3)
    with pytest.raises(TornWeights, match="requested weights of version 1 but read version stamps"):
        await receiver.receive(handles[0])
    assert numbers(await receiver.receive(handles[1])) == {2}
    with pytest.raises(TornWeights):
        staged.apply(torch.nn.Module())


async def test_the_same_version_published_anew_is_not_taken_for_what_it_was(
    transport: Transport,
) -> None:
    source = Source(transport)
    first = await source.publish(1)
    await source.publish(1)
    await source.publish(1)
    with pytest.raises(TornWeights):
        await WeightReceiver().receive(first)


async def test_what_was_offered_is_gone_when_the_publisher_is_closed(transport: Transport) -> None:
    source = Source(transport)
    handle = await source.publish(1)
    await source.publisher.close()
    with pytest.raises(PublisherGone, match="gone, and their publisher with them"):
        await WeightReceiver().receive(handle)


async def test_floating_tensors_leave_in_the_dtype_that_is_asked_for(transport: Transport) -> None:
    source = Source(transport, dtype=torch.bfloat16)
    staged = await WeightReceiver().receive(await source.publish(3))
    found = {names[0]: tensor.dtype for names, tensor in staged.tensors()}
    assert found == {"a": torch.bfloat16, "b": torch.int64}
    assert numbers(staged) == {3}


async def test_a_byte_that_changed_on_the_way_is_shown_by_tensor_rank_and_version(
    transport: Transport,
) -> None:
    receiver, proved = WeightReceiver(), Source(transport, checksums=True)
    handle = await proved.publish(2)
    assert numbers(await receiver.receive(handle)) == {2}
    [part] = handle.parts
    assert part.checksums is not None
    wrong = replace(part, checksums=(part.checksums[0], part.checksums[1] + 1))
    with pytest.raises(WrongChecksum, match="b of rank 0's part of version 2 has another"):
        await receiver.receive(replace(handle, parts=(wrong,)))
    assert (await Source(transport).publish(1)).parts[0].checksums is None


@pytest.mark.parametrize("place", [slice(0, 16), slice(-16, None)])
async def test_a_torn_mark_in_front_or_behind_is_refused(place: slice) -> None:
    source = Source(Transport("shm"))
    handle = await source.publish(7)
    assert source.publisher._sender is not None
    source.publisher._sender.memory(0)[place] = 0
    with pytest.raises(TornWeights, match="version 7 but read version stamps"):
        await WeightReceiver().receive(handle)


class HangingInlet:
    """Never ends, like a read from a process that is gone; writes at last all the same."""

    def __init__(self) -> None:
        self.asked: list[Tensor] = []
        self.begun, self.end = asyncio.Event(), asyncio.Event()

    async def fetch(self, _offer: Any, _shape: Any, memory: Tensor) -> None:
        self.asked.append(memory)
        self.begun.set()
        await self.end.wait()
        memory.fill_(77)

    def keep(self, _offers: list[Any]) -> None:
        return None


async def test_an_abandoned_read_ends_and_keeps_the_memory_that_it_may_write_to() -> None:
    source, hanging = Source(Transport("shm")), HangingInlet()
    open_receiver: list[Any] = [ShmReceiver(), hanging, ShmReceiver()]
    receiver = WeightReceiver(lambda _: open_receiver.pop(0))
    staged = await receiver.receive(await source.publish(1))
    receiver._receivers.clear()
    pulling = asyncio.ensure_future(receiver.receive(await source.publish(2)))
    await hanging.begun.wait()
    receiver.abandon()
    with pytest.raises(PullAbandoned, match="version 2 has not arrived"):
        await pulling
    receiver._receivers.clear()
    staged = await receiver.receive(await source.publish(3))
    hanging.end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert int(hanging.asked[0][0]) == 77
    assert numbers(staged) == {3}


async def test_memory_that_nobody_reads_from_any_more_is_used_again() -> None:
    source, receiver = Source(Transport("shm")), WeightReceiver()
    [first] = (await receiver.receive(await source.publish(1))).memories
    [second] = (await receiver.receive(await source.publish(2))).memories
    assert first is second


async def test_a_publish_that_nobody_waits_for_any_more_ends_before_the_next() -> None:
    begun, go_on, calls = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def state() -> dict[str, Tensor]:
        calls.append(len(calls))
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        return {"a": torch.full((3,), float(len(calls)))}

    publisher = WeightPublisher(state, transport=Transport("shm"))
    abandoned = asyncio.ensure_future(publisher.publish(1))
    await begun.wait()
    abandoned.cancel()
    publishing = asyncio.ensure_future(publisher.publish(2))
    await asyncio.to_thread(lambda: None)  # a second copy would have begun before
    assert calls == [0]
    go_on.set()
    assert numbers(await WeightReceiver().receive(await publishing)) == {2}


async def test_a_publisher_stays_with_its_tensors() -> None:
    source = Source(Transport("shm"))
    await source.publish(1)
    source.state["c"] = torch.zeros(1)
    with pytest.raises(WeightsMismatch, match="make a new publisher"):
        await source.publish(2)
    with pytest.raises(ValueError, match="version is -1"):
        await source.publisher.publish(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
async def test_a_publish_does_not_wait_for_kernels_of_other_streams() -> None:
    """A second of other work is queued on the device; the copy ends before it."""
    source = Source(Transport("shm"))
    source.state = {key: tensor.cuda() for key, tensor in source.state.items()}
    await source.publish(1)
    training = torch.cuda.Stream()
    with torch.cuda.stream(training):
        torch.cuda._sleep(2_000_000_000)
    handle = await source.publish(2)
    assert not training.query()
    assert numbers(await WeightReceiver().receive(handle)) == {2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["shm", "disk"])
async def test_weights_of_a_gpu_arrive_through_pinned_memory(name: Any, tmp_path: Path) -> None:
    source = Source(Transport(name, folder=tmp_path), dtype=torch.bfloat16)
    source.state = {key: tensor.cuda() for key, tensor in source.state.items()}
    for version in (1, 2, 3):
        staged = await WeightReceiver().receive(await source.publish(version))
        assert numbers(staged) == {version}
    await source.publisher.close()
    model = torch.nn.ParameterDict({"a": torch.zeros(300, 7, device="cuda")})
    model.register_buffer("b", torch.zeros(5, dtype=torch.int64, device="cuda"))
    staged.apply(model)
    assert model["a"].unique().tolist() == [3.0]


class Overtaken:
    """Memory of a receiver; when all was copied to it, the publisher begins to write again."""

    def __init__(self, source: Tensor) -> None:
        self.memory, self.source = torch.zeros_like(source), source

    def copy_(self, source: Tensor) -> None:
        self.memory.copy_(source)
        unstamp(self.source)

    def __getitem__(self, place: slice) -> Tensor:
        return self.memory[place]


def test_a_publisher_that_begins_while_shared_memory_is_copied_is_noticed() -> None:
    source = torch.zeros(256, dtype=torch.uint8)
    stamp(source, 4, 9)
    memory = Overtaken(source)
    _copy(source, memory)  # type: ignore[arg-type]
    with pytest.raises(TornWeights, match="read version stamps -1 and 4"):
        check_stamps(memory.memory, 4, 9)


async def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    source = Source(Transport("disk", folder=tmp_path))
    handle = await source.publish(1)
    file = handle.parts[0].offer.file
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(TornWeights, match="version 1 but read version stamps"):
        await WeightReceiver().receive(handle)


async def test_files_are_few_whole_private_and_gone_in_the_end(tmp_path: Path) -> None:
    source = Source(Transport("disk", folder=tmp_path / "deep" / "weights"))
    for version in range(5):
        handle = await source.publish(version)
    folder = handle.parts[0].offer.file.parent
    assert len(list(folder.iterdir())) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.glob(".*"))
    await source.publisher.close()
    assert not folder.exists()


async def test_shared_memory_has_no_name_and_is_nobody_elses() -> None:
    source = Source(Transport("shm"))
    file = (await source.publish(1)).parts[0].offer.file
    assert os.readlink(f"/proc/self/fd/{file.descriptor}").startswith("/memfd:")  # noqa: PTH115
    assert stat.S_IMODE(os.fstat(file.descriptor).st_mode) == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(file.descriptor, 0)  # a reader would be killed by SIGBUS
    assert not os.get_inheritable(file.descriptor)


async def test_a_receiver_maps_a_publisher_once_and_lets_the_former_one_go() -> None:
    receiver, transport_receiver = WeightReceiver(lambda _: transport_receiver), ShmReceiver()
    former, latter = Source(Transport("shm")), Source(Transport("shm"))
    await receiver.receive(await former.publish(1))
    [(file, mapped)] = transport_receiver._mapped.items()
    await receiver.receive(await former.publish(2))
    assert transport_receiver._mapped[file] is mapped
    await receiver.receive(await latter.publish(3))
    assert len(transport_receiver._mapped) == 1
    assert file not in transport_receiver._mapped


async def test_a_mapped_version_can_be_had_after_the_end_of_its_publisher() -> None:
    source, receiver = Source(Transport("shm")), WeightReceiver()
    await receiver.receive(await source.publish(1))
    handle = await source.publish(2)
    await source.publisher.close()
    assert numbers(await receiver.receive(handle)) == {2}


async def test_shared_memory_of_elsewhere_is_refused_with_the_repair() -> None:
    transport_sender = ShmSender(64)
    offer = await transport_sender.offer(0)
    memory = torch.zeros(64, dtype=torch.uint8)

    async def fetch(**changes: Any) -> None:
        other = replace(offer, file=replace(offer.file, **changes))
        await ShmReceiver().fetch(other, None, memory)  # type: ignore[arg-type]

    with pytest.raises(TransportUnavailable, match=r"another host.*transport to rdma"):
        await fetch(host="elsewhere")
    with pytest.raises(PublisherGone):
        await fetch(descriptor=10_000)
    with pytest.raises(PublisherGone):
        await fetch(inode=offer.file.inode + 1)  # the number means another file by now
