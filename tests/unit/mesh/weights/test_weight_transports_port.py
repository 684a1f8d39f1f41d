"""What each carrier does for itself: shared memory without a name, files that are few and whole."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_source import Source, numbers

from composer_mesh.mesh.weights.choice import Transport
from composer_mesh.mesh.weights.manifest import PublisherGone, TornWeights, TransportUnavailable
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.mesh.weights.transports import shm
from composer_mesh.mesh.weights.transports.port import check_stamps, stamp, unstamp
from composer_mesh.mesh.weights.transports.shm import ShmReceiver, ShmSender


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
    shm._copy(source, memory)  # type: ignore[arg-type]
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
