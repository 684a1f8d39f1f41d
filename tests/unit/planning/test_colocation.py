"""A run whose processes take turns on GPUs: what each turn needs, and when it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from repository import ROOT

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.memory import CUDA_CONTEXT, FLOAT, GB, total
from composer_mesh.planning.memory_estimate import PARKED, memory_of
from composer_mesh.planning.model_sizes import parameter_count, sizes_of
from composer_mesh.planning.placement_solver import CannotPlace, by_turns, place

ONE = HostResources("node", 32, 512 * GB, 1, 79 * GB)
SHARED = {
    "placement.colocate": "true",
    "schedule.max_lag": "0",
    "generator.replicas": "1",
    "trainer.ranks": "1",
    "placement.trainer.gpus": "1",
    "placement.generator.gpus": "0.75",
    "placement.reference.gpus": "0.25",
    "replay.delivery": "same_step",
    "sdpo.placement": "inline",
}


def config(**more: str) -> Any:
    values = {**SHARED, **{key.replace("__", "."): value for key, value in more.items()}}
    return load_config(
        ROOT / "configs" / "quickstart.toml", [f"{k}={v}" for k, v in values.items()]
    )


def parked(memory: Any) -> int:
    return sum(part.bytes for part in memory.host if part.what == PARKED)


def test_each_turn_has_the_whole_gpu_and_without_turns_they_do_not_fit() -> None:
    shared = config()
    placement = place(shared, [ONE], sizes_of(shared.policy))
    on_gpus = {one.process.kind: one.gpus for one in placement.placed if one.gpus}
    assert on_gpus == {"trainer": (0,), "generator": (0,), "reference": (0,)}
    (note,) = by_turns(placement)
    assert note.startswith("node shares its GPUs in turns: sampling ")
    assert "training " in note
    with pytest.raises(CannotPlace, match="has 0 of its 1 GPUs free"):
        place(config(placement__colocate="false"), [ONE], sizes_of(shared.policy))


def test_shares_add_up_within_a_turn() -> None:
    crowded = config(placement__generator__gpus="0.9")
    with pytest.raises(CannotPlace) as refused:
        place(crowded, [ONE], sizes_of(crowded.policy))
    assert "all GPUs in the turn of sampling: generator 0.90 + reference 0.25" in str(refused.value)


def test_what_sleeps_is_pinned_on_the_host_and_leaves_only_its_context_on_the_gpu() -> None:
    shared, alone = config(), config(placement__colocate="false")
    sizes = sizes_of(shared.policy)
    whole = FLOAT * parameter_count(sizes)
    found = {kind: memory_of(kind, shared, sizes) for kind in ("trainer", "generator", "reference")}
    frozen = sum(p.bytes for p in found["trainer"].gpu if p.what == "frozen copies")
    assert parked(found["trainer"]) == 3 * whole + frozen
    assert parked(found["generator"]) == 0  # the version pulled last is on the host already
    assert parked(found["reference"]) == whole
    for kind, sleepers in (("trainer", 2), ("generator", 1), ("reference", 1)):
        more = total(found[kind].gpu) - total(memory_of(kind, alone, sizes).gpu)
        assert more == sleepers * CUDA_CONTEXT
    offloaded = memory_of("trainer", config(trainer__optimizer_offload="true"), sizes)
    assert parked(offloaded) == whole + frozen


def test_a_turn_that_needs_more_than_the_gpu_has_is_refused_with_its_sum() -> None:
    shared = config()
    small = HostResources("node", 32, 512 * GB, 1, 3 * GB)
    with pytest.raises(CannotPlace, match=r"asleep on it 3\.00"):
        place(shared, [small], sizes_of(shared.policy))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"schedule__max_lag": "1"}, "schedule.max_lag is 1, and generators that sleep"),
        (
            {"generator__engine": "vllm", "placement__generator__gpus": "0"},
            "gives up its memory on GPUs only",
        ),
    ],
)
def test_what_contradicts_turns_is_refused_with_its_repair(more: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        config(**more)
    assert "colocate to false" in str(refused.value)
