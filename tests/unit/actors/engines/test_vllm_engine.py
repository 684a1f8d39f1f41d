"""vLLM behind the port, with a stand-in for vLLM: names, labels, faults and the order of a swap.

Adapters for vLLM: complete, in place, and each request with those of the newest version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stepped import FakeLlm, Plain, completion, request
from torch import Tensor

from composer_mesh.actors.engines.port import LogitsNotFinite, PromptTokens, RequestTooLong
from composer_mesh.actors.engines.vllm_engine import EngineFault, RequestLimits, VllmEngine
from composer_mesh.actors.engines.vllm_settings import (
    LORA_SLOTS,
    VllmUnavailable,
    check_vllm_fits,
    lora_slot,
)
from composer_mesh.actors.engines.vllm_weights import (
    AdapterRefused,
    AdapterSlots,
    VllmAdapters,
    WeightsIncomplete,
    adapter_shapes,
)
from composer_mesh.actors.models.lora import PREFIX, adapter_files
from composer_mesh.configs.trainer import LoraConfig
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

LIMITS = RequestLimits(length=16, vocabulary=100, concurrent=2)


def engine(llm: FakeLlm, **outputs: Any) -> VllmEngine:
    """An engine whose vLLM answers a request by what its id names here."""

    def sampling(asked: GenerationRequest) -> Any:
        return outputs[asked.request_id]

    return VllmEngine(llm, sampling, lambda weights: llm.calls.append("update"), LIMITS)


def serve(engine: VllmEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    for asked in requests:
        engine.submit(asked, results.append)
    while engine.busy:
        engine.step()
    return results


def test_each_token_has_the_version_of_its_span() -> None:
    spans = [("0", 0, 2), ("3", 2, 3), ("4", 3, 5)]
    served = engine(FakeLlm(), r=completion([9, 8, 7, 6, 5], spans))
    assert serve(served, request("r", new=5)) == [
        GenerationResult(
            "r", [9, 8, 7, 6, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], [0, 0, 3, 4, 4], "length"
        )
    ]


def test_a_stop_token_at_the_last_place_counts_as_a_stop() -> None:
    served = engine(FakeLlm(), r=completion([9, 8], [("0", 0, 2)], "length"))
    assert serve(served, request("r", new=2, stop=[8]))[0].stop_reason == "stop"


def test_requests_wait_here_until_vllm_has_a_free_slot() -> None:
    llm = FakeLlm()
    served = engine(llm, **{name: completion([9], [("0", 0, 1)]) for name in "abc"})
    results: list[GenerationResult] = []
    for name in "abc":
        served.submit(request(name), results.append)
    served.step()
    assert (len(llm.added), served.outstanding) == (2, 1)
    served.step()
    assert [one.request_id for one in results] == ["a", "b", "c"]


def test_the_tokens_that_vllm_had_cached_are_reported() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9], [("0", 0, 1)]))
    llm.cached = 4
    assert serve(served, request("r", [5] * 6))[0].cached_tokens == 4
    llm.cached = None
    assert serve(served, request("r", [5] * 6))[0].cached_tokens == 0
    assert served.prompt_tokens == PromptTokens(prompt=12, cached=4, computed=8)


def test_an_aborted_request_is_aborted_in_vllm_before_its_next_step() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9, 8, 7], [("0", 0, 3)]))
    served.submit(request("r"), lambda _: None)
    served.step()
    served.abort("r")
    assert served.step() == 0
    assert llm.calls[-1] == f"abort {llm.added[0][0]}"
    assert not served.busy


def test_prefixes_are_dropped_before_what_comes_next_unless_something_decodes() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9, 8], [("0", 0, 2)]), s=completion([9], [("0", 0, 1)]))
    served.drop_prefixes()
    served.submit(request("r"), lambda _: None)
    served.step()
    assert llm.calls == ["label 0", "reset False"]
    served.drop_prefixes()
    served.submit(request("s"), lambda _: None)
    served.step()
    assert llm.calls == ["label 0", "reset False"]


def test_what_comes_during_a_step_is_admitted_by_the_next() -> None:
    llm = FakeLlm()
    served = engine(llm, r=completion([9], [("0", 0, 1)]))
    results: list[GenerationResult] = []

    def ask_again(result: GenerationResult) -> None:
        results.append(result)
        if len(results) < 3:
            served.submit(request("r"), ask_again)

    served.submit(request("r"), ask_again)
    sampled = []
    while served.busy:
        assert served.outstanding == 1
        sampled.append(served.step())
    assert (len(results), sampled, served.outstanding) == (3, [1, 1, 1], 0)


def test_a_swap_puts_weights_in_then_drops_what_was_computed_then_labels() -> None:
    llm = FakeLlm()
    served = engine(llm)
    served.swap(Plain(5))
    assert llm.calls == ["label 0", "update", "reset True", "label 5"]
    assert served.version == 5


def test_it_sleeps_without_keys_and_wakes_with_new_weights_before_its_cache() -> None:
    llm = FakeLlm()
    served = engine(llm)
    served.sleep(())
    served.wake(Plain(5))
    slept = ["reset True", "sleep 1"]
    assert llm.calls == ["label 0", *slept, "wake weights", "update", "label 5", "wake kv_cache"]
    llm.calls.clear()
    served.sleep(())
    served.wake(None)
    assert llm.calls == [*slept, "wake weights", "wake kv_cache"]
    llm.resets = False
    with pytest.raises(EngineFault, match="kept cached keys and values of version 5 while it slee"):
        served.sleep(())


def test_a_cache_that_stays_under_new_weights_is_a_fault() -> None:
    llm = FakeLlm()
    llm.resets = False
    served = engine(llm)
    with pytest.raises(EngineFault, match="version 0 under the weights of version 5"):
        served.swap(Plain(5))
    assert served.version == 0


def test_an_idle_vllm_that_keeps_prefixes_it_should_drop_is_a_fault() -> None:
    llm = FakeLlm()
    llm.resets = False
    served = engine(llm)
    served.drop_prefixes()
    served.submit(request("r"), lambda _: None)
    with pytest.raises(EngineFault, match="though nothing decodes"):
        served.step()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (completion([9], [("0", 0, 1)], "abort"), "gave r up: abort"),
        (completion([9, 8], [("0", 0, 1)]), "2 tokens, 2 log-probs and 1 versions"),
    ],
)
def test_an_answer_that_should_never_be_is_a_fault(output: Any, message: str) -> None:
    with pytest.raises(EngineFault, match=message):
        serve(engine(FakeLlm(), r=output), request("r"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("r", [1] * 10, new=7), "needs 10 prompt and 7 new tokens but a row holds 16"),
        (GenerationRequest("r", [], 3, 1.0, 7, []), "has 0 prompt ids but needs at least one"),
        (request("r", [5, 100]), "all of them from 0 to 99"),
        (request("r", [5, -1]), "all of them from 0 to 99"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(
    asked: GenerationRequest, message: str
) -> None:
    served = engine(FakeLlm())
    with pytest.raises(ValueError, match=message) as caught:
        served.submit(asked, lambda _: None)
    assert isinstance(caught.value, RequestTooLong) == ("holds 16" in message)
    assert not served.busy


def test_closing_ends_the_workers() -> None:
    llm = FakeLlm()
    engine(llm).close()
    assert llm.calls[-1] == "shutdown"


def test_an_answer_without_finite_logits_fails_alone() -> None:
    broken = completion([9, 9], [("5", 0, 2)])
    broken.logprobs.logprobs[1] = float("nan")
    served = engine(FakeLlm(), bad=broken, good=completion([9], [("5", 0, 1)]))
    served.swap(Plain(5))
    found = serve(served, request("bad", new=2), request("good", new=1))
    assert {type(one) for one in found} == {LogitsNotFinite, GenerationResult}
    assert any("logits are not finite at version 5, in bad" in str(one) for one in found)
    assert served.outstanding == 0


def test_a_temperature_that_vllm_would_replace_is_refused() -> None:
    served = engine(FakeLlm())
    with pytest.raises(ValueError, match="whatever is lower"):
        served.submit(replace(request("r"), temperature=0.001), print)


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
    limits = RequestLimits(length=16, vocabulary=100, concurrent=2)
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
