"""Which transport weights take, and that a process which cannot use it says what helps."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_mesh.configs.weights import WeightsConfig
from composer_mesh.mesh.weights.choice import choose, published_dtype
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.services.run.weights_folder import settled

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


def test_shared_memory_of_several_hosts_is_refused_with_the_repair() -> None:
    with pytest.raises(TransportUnavailable, match="the run has 2 hosts: set weights"):
        choose(WeightsConfig(transport="shm"), 2)


@pytest.mark.skipif(find_spec("torchstore") is not None, reason="torchstore is installed")
def test_torchstore_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(TransportUnavailable, match=r"not installed.*--no-deps torchstore==0\.1\.2"):
        choose(WeightsConfig(transport="torchstore"))


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
    with pytest.raises(TransportUnavailable, match="2 hosts"):
        async with settled(shared, tmp_path, no_event, hosts=2):
            pass
