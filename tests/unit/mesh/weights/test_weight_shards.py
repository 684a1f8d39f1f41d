"""A trainer of several ranks: each publishes its own rows, and receivers have whole tensors.

Which transport weights take, and that a process which cannot use it says what helps.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from composer_mesh.configs.weights import WeightsConfig
from composer_mesh.mesh.weights.choice import Transport, choose, published_dtype
from composer_mesh.mesh.weights.manifest import (
    TransportUnavailable,
    WeightsHandle,
    WeightsMismatch,
    own_rows,
)
from composer_mesh.mesh.weights.publisher import WeightPublisher
from composer_mesh.mesh.weights.receiver import WeightReceiver
from composer_mesh.services.run.weights_folder import settled

SHM = Transport("shm")


@dataclass(frozen=True)
class FakeMesh:
    """A device mesh as one rank of several sees it, without the others."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


class FakeDTensor:
    """One rank's rows of a tensor, split as torch splits it."""

    def __init__(self, whole: Tensor, mesh: FakeMesh, placements: tuple[Any, ...]) -> None:
        self.device_mesh, self.placements = mesh, placements
        self.shape, self.dtype = whole.shape, whole.dtype
        self.is_floating_point = whole.is_floating_point
        local, offset = _compute_local_shape_and_global_offset(
            whole.shape, mesh.sizes, mesh.coordinate, placements
        )
        index = tuple(slice(begin, begin + size) for begin, size in zip(offset, local, strict=True))
        self.local = whole[index].clone()

    def to_local(self) -> Tensor:
        return self.local


def shards(
    state: Mapping[str, Tensor], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> Iterator[dict[str, Any]]:
    """The state of each rank; scalars are on all of them. Names of one tensor stay tied."""
    for rank in range(math.prod(sizes)):
        coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), sizes))
        made: dict[int, Any] = {}
        yield {
            name: made.setdefault(
                id(whole),
                FakeDTensor(whole, FakeMesh(sizes, coordinate), placements)
                if whole.dim()
                else whole,
            )
            for name, whole in state.items()
        }


Publish = Callable[[list[dict[str, Any]]], Awaitable[list[WeightsHandle]]]


@pytest.fixture
async def publish_all() -> AsyncIterator[Publish]:
    """Publishes the states of all ranks; what they offer lasts until the end of the test."""
    publishers: list[WeightPublisher] = []

    async def publish(states: list[dict[str, Any]]) -> list[WeightsHandle]:
        new = [
            WeightPublisher(partial(dict, state), transport=SHM, rank=rank, ranks=len(states))
            for rank, state in enumerate(states)
        ]
        publishers.extend(new)
        return [await publisher.publish(3) for publisher in new]

    yield publish
    for publisher in publishers:
        await publisher.close()


def some_state() -> dict[str, Tensor]:
    """Tensors that split evenly, unevenly, and into fewer rows than there are ranks."""
    embedding = torch.randn(7, 3)
    return {
        "embed": embedding,
        "even": torch.randn(8, 2).bfloat16(),
        "few": torch.arange(2),
        "one": torch.randn(1, 2, 2),
        "none": torch.randn(0, 4),
        "scalar": torch.tensor(4.5),
        "head": embedding,
    }


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((1,), (Shard(0),)),
        ((2,), (Shard(0),)),
        ((3,), (Shard(0),)),
        ((5,), (Shard(0),)),
        ((3,), (Replicate(),)),
        ((2, 3), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Shard(0))),
    ],
)
async def test_the_parts_of_all_ranks_are_the_whole(
    sizes: tuple[int, ...], placements: tuple[Any, ...], publish_all: Publish
) -> None:
    state = some_state()
    handles = await publish_all(list(shards(state, sizes, placements)))
    staged = await WeightReceiver().receive(WeightsHandle.joined(handles))
    found = {name: tensor for names, tensor in staged.tensors() for name in names}
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert sum(1 for names, _ in staged.tensors() if len(names) > 1) == 1
    target = nn.Module()
    for name, tensor in state.items():
        target.register_buffer(name, torch.zeros_like(tensor))
    staged.apply(target)
    for name, tensor in state.items():
        assert torch.equal(target.state_dict()[name], tensor), name


async def test_parts_that_are_not_the_whole_are_refused_before_anything_is_read(
    publish_all: Publish,
) -> None:
    state = {"a": torch.randn(5, 2), "b": torch.randn(4)}
    first, second = await publish_all(list(shards(state, (2,), (Shard(0),))))
    for handles in ([first], [second], [first, first], [first, second, second]):
        with pytest.raises(WeightsMismatch, match=r"a has 5 rows, but the parts of ranks"):
            WeightsHandle.joined(handles)
    with pytest.raises(WeightsMismatch, match="join the handles of all ranks"):
        await WeightReceiver().receive(first)
    with pytest.raises(WeightsMismatch, match="rank 1 published version 4 but rank 0 version 3"):
        WeightsHandle.joined([first, replace(second, version=4)])
    (other,) = await publish_all([{"a": torch.randn(5, 3)}])
    with pytest.raises(WeightsMismatch, match=r"rank 1 published a: .* \(5, 3\) where rank 0 has"):
        WeightsHandle.joined([first, other])


async def test_only_rows_are_published_in_parts(publish_all: Publish) -> None:
    for placements in ((Shard(1),), (Shard(0), Shard(1))):
        sizes = (2,) * len(placements)
        states = list(shards({"wide": torch.randn(4, 4)}, sizes, placements))
        with pytest.raises(WeightsMismatch, match=r"wide is placed as .* call full_tensor"):
            await publish_all(states)
    mesh = FakeMesh((2,), (0,))
    odd = FakeDTensor(torch.randn(5, 2), mesh, (Shard(0),))
    odd.local = odd.local[:1]
    with pytest.raises(WeightsMismatch, match="odd has 1 rows on rank 0, but an even spread of 5"):
        own_rows({"odd": odd}, 0, None)  # type: ignore[dict-item]


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 1), (1, 1), (2, 2)])
def test_a_rank_is_one_of_the_ranks(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank} of {ranks} ranks"):
        WeightPublisher(dict, transport=SHM, rank=rank, ranks=ranks)


def test_empty_tensors_are_tied_only_where_they_are_one() -> None:
    tied = torch.empty(0, 4)
    rows = own_rows({"a": torch.empty(0, 4), "b": tied, "c": tied}, 0, None)
    assert [one.entry.names for one in rows] == [("a",), ("b", "c")]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
async def test_a_model_that_fsdp_shards_arrives_whole_with_its_tied_head() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False)))
    model.head.weight = model.embed.weight
    expected = model.embed.weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    publisher = WeightPublisher(model.state_dict, transport=SHM, dtype=torch.bfloat16)
    staged = await WeightReceiver().receive(await publisher.publish(1))
    [(names, tensor)] = staged.tensors()
    assert names == ("embed.weight", "head.weight")
    assert torch.equal(tensor, expected.bfloat16())


HOST = {"name": "h", "cores": 8, "memory_gb": 64.0}


def no_event(kind: str, _actor: str, detail: str, /, **_fields: Any) -> None:
    raise AssertionError(f"{kind}: {detail}")


def test_auto_takes_shared_memory_on_one_host_and_one_sided_reads_elsewhere() -> None:
    auto = WeightsConfig()
    assert str(choose(auto)) == "shm (trainer and receivers share one host)"
    assert str(choose(auto, 3)) == "rdma (the run has 3 hosts)"


@pytest.mark.parametrize("name", ["shm", "rdma", "disk"])
def test_what_is_asked_for_is_taken(name: Any) -> None:
    assert str(choose(WeightsConfig(transport=name))) == f"{name} (as weights.transport says)"


def test_half_precision_is_published_where_everybody_serves_it(build_config: Any) -> None:
    def of(dtype: str, alpha: float) -> torch.dtype | None:
        return published_dtype(build_config(generator={"dtype": dtype}, sdpo={"alpha": alpha}))

    assert of("bfloat16", 0.0) is torch.bfloat16
    assert of("bfloat16", 1.0) is None  # the SDPO teacher follows in full precision
    assert of("float32", 0.0) is None


@pytest.mark.parametrize(
    ("teacher", "published"),
    [("live", torch.bfloat16), ("trust_region", torch.bfloat16), ("ema", None)],
)
def test_a_teacher_in_half_precision_lets_weight_sync_be_so_unless_it_is_an_average(
    teacher: str, published: torch.dtype | None, build_config: Any
) -> None:
    config = build_config(
        generator={"dtype": "bfloat16"},
        sdpo={"alpha": 1.0, "teacher": teacher},
        trainer={"frozen_dtype": "bfloat16"},
    )
    assert published_dtype(config) is published


async def test_a_run_settles_on_one_transport_for_all_its_actors(
    build_config: Any, tmp_path: Path
) -> None:
    async with settled(build_config(), tmp_path, no_event) as (config, transport):
        assert config.weights.transport == transport.name == "shm"
        assert choose(config.weights).name == "shm"
    two = build_config(placement={"hosts": ({**HOST, "count": 2},)})
    async with settled(two, tmp_path, no_event) as (config, _):
        assert choose(config.weights).name == "rdma"


async def test_the_hosts_that_a_run_has_decide_and_not_what_its_config_can_say(
    build_config: Any, tmp_path: Path
) -> None:
    one = build_config(placement={"hosts": (HOST,)})
    async with settled(one, tmp_path, no_event, hosts=2) as (config, transport):
        assert config.weights.transport == "rdma"
        assert transport.reason == "the run has 2 hosts"
    two = build_config(placement={"hosts": ({**HOST, "count": 2},)})
    async with settled(two, tmp_path, no_event, hosts=1) as (config, _):
        assert config.weights.transport == "shm"
    workers = {"kind": "hosts", "workers": ("tcp://10.0.0.5:1", "tcp://10.0.0.6:1")}
    async with settled(build_config(cluster=workers), tmp_path, no_event) as (config, _):
        assert config.weights.transport == "rdma"
    shared = build_config(weights={"transport": "shm"})
    with pytest.raises(TransportUnavailable, match="the run has 2 hosts: set weights"):
        async with settled(shared, tmp_path, no_event, hosts=2):
            pass
