"""Adapters for vLLM: complete, in place, and each request with those of the newest version."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepped import FakeLlm, Plain, completion, request
from torch import Tensor

from composer_mesh.actors.engines.vllm_engine import Limits, VllmEngine
from composer_mesh.actors.engines.vllm_installed import VllmUnavailable
from composer_mesh.actors.engines.vllm_settings import LORA_SLOTS, check_vllm_fits, lora_slot
from composer_mesh.actors.engines.vllm_weights import (
    AdapterRefused,
    AdapterSlots,
    VllmAdapters,
    WeightsIncomplete,
    adapter_shapes,
)
from composer_mesh.actors.models.adapter_files import PREFIX, adapter_files
from composer_mesh.configs.trainer import LoraConfig

LAYER = "model.layers.0.self_attn.q_proj"
DOWN, UP = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight"
SHAPES = {DOWN: (4, 6), UP: (8, 4)}
LORA = LoraConfig(rank=4, alpha=8.0)


@dataclass(frozen=True)
class Request:
    """What vLLM calls a `LoRARequest`."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


class Workers:
    """Read the folders of adapters while they exist, as vLLM's workers do."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Request, dict[str, Tensor], dict[str, Any]]] = []

    def add_lora(self, request: Request) -> bool:
        folder = Path(request.lora_path)
        tensors = load_file(folder / "adapter_model.safetensors")
        settings = json.loads((folder / "adapter_config.json").read_text())
        self.loaded.append((request, tensors, settings))
        return True

    def remove_lora(self, number: int) -> bool:
        return any(request.lora_int_id == number for request, _, _ in self.loaded)


def version(number: int, **changes: Tensor) -> Plain:
    given = {DOWN: torch.full((4, 6), 1.0 * number), UP: torch.full((8, 4), 2.0 * number)}
    return Plain(number, {(name,): one for name, one in (given | changes).items()})


def test_each_version_replaces_the_adapters_in_place_and_leaves_no_folder() -> None:
    workers = Workers()
    adapters = VllmAdapters(workers, Request, LORA, SHAPES)
    adapters.update(version(3))
    (first, zeros, _), (second, tensors, settings) = workers.loaded
    assert all(one.abs().sum() == 0 for one in zeros.values())
    torch.testing.assert_close(tensors[f"{PREFIX}{LAYER}.lora_A.weight"], torch.full((4, 6), 3.0))
    torch.testing.assert_close(tensors[f"{PREFIX}{LAYER}.lora_B.weight"], torch.full((8, 4), 6.0))
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    assert first.lora_int_id == second.lora_int_id
    assert first.load_inplace
    assert second.load_inplace
    assert not Path(second.lora_path).exists()


def test_a_request_has_the_adapter_without_a_reload_at_each_step() -> None:
    workers, llm = Workers(), FakeLlm()
    adapters = VllmAdapters(workers, Request, LORA, SHAPES)
    ends = completion([9], [("0", 0, 1)])
    limits = Limits(length=16, vocabulary=100, concurrent=2)
    engine = VllmEngine(llm, lambda _: ends, adapters.update, limits, adapters.of_request)
    engine.submit(request("one"), lambda _: None)
    engine.step()
    engine.swap(version(1))
    engine.submit(request("two"), lambda _: None)
    engine.step()
    old, new = llm.adapters
    assert (old.lora_int_id, old.load_inplace) == (new.lora_int_id, new.load_inplace) == (1, False)
    assert len(workers.loaded) == 2


def test_an_incomplete_or_other_version_is_refused_and_the_old_one_is_kept() -> None:
    workers = Workers()
    adapters = VllmAdapters(workers, Request, LORA, SHAPES)
    with pytest.raises(WeightsIncomplete, match="version 2 of the weights lacks 1 tensors"):
        adapters.update(Plain(2, {(DOWN,): torch.zeros(4, 6)}))
    with pytest.raises(AdapterRefused, match=r"lora_A.* of shape \[2, 6\].* have \[4, 6\]"):
        adapters.update(version(2, **{DOWN: torch.zeros(2, 6)}))
    with pytest.raises(AdapterRefused, match=r"other of shape .* no such weight"):
        adapters.update(version(2, other=torch.zeros(1)))
    assert len(workers.loaded) == 1


def test_shapes_are_those_of_the_trainers_adapters(build_model: Any) -> None:
    pytest.importorskip("peft", exc_type=ModuleNotFoundError)
    from composer_mesh.actors.models.lora import (
        adapted_layer_names,
        adapter_weights,
        add_adapters,
    )

    plain, trained = build_model(1), build_model(1)
    add_adapters(trained, LORA, 0)
    expected = {name: tuple(one.shape) for name, one in adapter_weights(trained).items()}
    assert adapter_shapes(plain, adapted_layer_names(plain, None), 4) == expected


def test_vllm_reserves_the_next_rank_that_it_has(build_config: Any, tmp_path: Path) -> None:
    assert [lora_slot(rank) for rank in (1, 2, 16, 17, 512)] == [1, 8, 16, 32, 512]
    assert list(LORA_SLOTS) == sorted(LORA_SLOTS)


def test_a_rank_that_vllm_has_not_is_refused_before_a_run(build_config: Any) -> None:
    lora = {"rank": 600, "sync": "adapters"}
    config = build_config(trainer={"lora": lora}, generator={"engine": "vllm"})
    with pytest.raises(VllmUnavailable, match=r"trainer\.lora\.rank is 600.*up to rank 512"):
        check_vllm_fits(config)


def test_no_request_gets_the_adapter_of_a_freed_one() -> None:
    """The ids of freed objects are given again; those of requests that are held are not."""
    pairs = {LAYER: (torch.zeros(4, 6), torch.zeros(8, 4))}
    slots = AdapterSlots(Workers(), Request)
    name = slots.add(adapter_files(pairs, "", 4, 8.0))
    for number in range(100):
        slots.use(request(f"adapted-{number}"), name)  # held here alone
        assert slots.of_request(request(f"plain-{number}")) is None
    mine = request("mine")
    slots.use(mine, name)
    assert slots.of_request(mine).lora_name == name
    folder = Path(slots.of_request(mine).lora_path)
    assert folder.is_dir()
    slots.forget(mine)
    assert slots.of_request(mine) is None
    slots.remove(name)
    assert not folder.exists()
