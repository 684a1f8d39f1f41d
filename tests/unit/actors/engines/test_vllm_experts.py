"""The experts of a mixture from vLLM: what it returns on GPUs, what our worker notes on CPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import family_model
from pydantic import ValidationError
from stepped import FakeLlm, completion

from composer_mesh.actors.engines.port import ExpertsUnknown
from composer_mesh.actors.engines.vllm_engine import EngineFault, Experts, RequestLimits, VllmEngine
from composer_mesh.actors.engines.vllm_settings import (
    VllmUnavailable,
    check_vllm_fits,
    expert_arguments,
    process_environment,
)
from composer_mesh.actors.engines.vllm_start import (
    ExpertLayers,
    refuse_without_experts,
)
from composer_mesh.actors.engines.vllm_worker import (
    CHOSEN_EXPERTS,
    NOTE_EXPERTS,
    ExpertSlots,
    ExpertsNotNoted,
    PolicyWorker,
)
from composer_mesh.actors.models.expert_routing import numbers_of
from composer_mesh.planning.model_refusals import UnsupportedRouting
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

LIMITS = RequestLimits(length=64, vocabulary=100, concurrent=2)
ON_GPU = {"generator": {"gpus": 1.0}}
PROMPT, TOKENS = [1, 2, 3, 4, 5], [9, 8, 7]
LAYERS = ExpertLayers([0, 2], 2, SimpleNamespace(get_text_config=SimpleNamespace))


def asking(start: int | None = 0) -> GenerationRequest:
    return GenerationRequest("r", PROMPT, 3, 1.0, 7, [], experts_from=start)


def answered(request: GenerationRequest, experts: Experts, returned: Any) -> GenerationResult:
    """What an engine answers whose vLLM returns these experts."""
    output = completion(TOKENS, [("0", 0, 3)])
    output.routed_experts = returned
    engine = VllmEngine(FakeLlm(), lambda _: output, lambda _: None, LIMITS, experts=experts)
    results: list[GenerationResult] = []
    engine.submit(request, results.append)
    while engine.busy:
        engine.step()
    return results[0]


def rows(start: int, kind: str = "uint8") -> Any:
    """As vLLM 0.32 returns them: the positions from `start` to the last but one, of 3 layers, the
    second of them dense, 2 experts a token."""
    whole = np.arange(7 * 3 * 2, dtype=kind).reshape(7, 3, 2)
    whole[:, 1] = 0
    return whole[start:]


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_returned_experts_are_those_of_the_layers_that_have_some(start: int, kind: str) -> None:
    config = SimpleNamespace(num_experts=400 if kind == "uint16" else 8, num_experts_per_tok=2)
    layers = ExpertLayers([0, 2], 2, SimpleNamespace(get_text_config=lambda: config))
    result = answered(asking(start), layers.returned, rows(start, kind))
    assert result.experts is not None
    assert result.experts.shape == (2, 2, 2 if kind == "uint16" else 1)
    found = numbers_of(result.experts)
    assert found.tolist() == rows(start)[:, [0, 2]].tolist()


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "reported no experts of r"),
        (rows(1), r"experts \[6, 2, 2\] \(.*\) of r, which are \[7, 2, 2\]"),
        (rows(0)[:, :, :1], r"experts \[7, 2, 1\] .* which are \[7, 2, 2\]"),
    ],
)
def test_experts_of_other_positions_are_a_fault(returned: Any, why: str) -> None:
    with pytest.raises(EngineFault, match=why):
        answered(asking(), LAYERS.returned, returned)


class Workers:
    """Two workers, of which the first notes experts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, method: str, *, args: Any) -> list[Any]:
        assert hasattr(PolicyWorker, method)
        self.calls.append((method, args))
        if method == NOTE_EXPERTS:
            return [None, None]
        _, start, end = args
        return [torch.from_numpy(rows(0)[start:end, [0, 2]].astype("int16")), None]


def test_noted_experts_are_asked_for_by_the_name_that_vllm_has_for_a_request() -> None:
    workers = Workers()
    config = SimpleNamespace(num_experts=8, num_experts_per_tok=2)
    layers = ExpertLayers([0, 2], 2, SimpleNamespace(get_text_config=lambda: config))
    result = answered(asking(4), layers.noting(workers), None)
    assert workers.calls == [(NOTE_EXPERTS, ([0, 2], 2)), (CHOSEN_EXPERTS, ("0-of-vllm", 4, 7))]
    assert result.experts is not None
    assert numbers_of(result.experts).tolist() == rows(4)[:, [0, 2]].tolist()


def test_who_does_not_ask_is_told_no_experts() -> None:
    workers = Workers()
    assert answered(asking(None), LAYERS.noting(workers), None).experts is None
    assert [method for method, _ in workers.calls] == [NOTE_EXPERTS]


def test_experts_that_an_engine_does_not_know_are_refused_at_once() -> None:
    engine = VllmEngine(FakeLlm(), lambda _: None, lambda _: None, LIMITS)
    with pytest.raises(ExpertsUnknown, match="r requests the experts of its tokens, which this"):
        engine.submit(asking(), lambda _: None)
    assert not engine.busy


def slots() -> ExpertSlots:
    """Four blocks of four slots; layers 0 and 2 have experts, two for a token."""
    return ExpertSlots(4, 4, [0, 2], 2)


def test_experts_are_kept_in_the_slots_of_the_keys() -> None:
    kept = slots()
    at = torch.tensor([8, 9, 10, 11, 4, 5, -1])  # a request in the blocks 2 and 1; and padding
    chosen = torch.arange(14).view(7, 2)
    kept.note(0, chosen, at)
    kept.note(2, chosen + 100, at)
    whole = torch.stack([chosen, chosen + 100], dim=1)[:6]
    assert kept.of([2, 1], 0, 6).tolist() == whole.tolist()
    assert kept.of([2, 1], 3, 5).tolist() == whole[3:5].tolist()
    kept.note(0, torch.tensor([[7, 7]]), torch.tensor([9]))  # computed again
    assert kept.of([2], 1, 2).tolist() == [[[7, 7], [102, 103]]]


def test_positions_of_which_a_layer_told_nothing_are_an_error() -> None:
    kept, at = slots(), torch.tensor([0, 1])
    kept.note(0, torch.zeros(2, 2), at)
    with pytest.raises(ExpertsNotNoted, match="positions 0 to 1: no router reported those of 2"):
        kept.of([0], 0, 2)
    kept.note(2, torch.zeros(2, 2), at)
    assert kept.of([0], 0, 2).shape == (2, 2, 2)
    kept.clear()
    with pytest.raises(ExpertsNotNoted, match="no router reported those of 2"):
        kept.of([0], 0, 2)


def test_choices_of_other_tokens_are_an_error() -> None:
    with pytest.raises(ExpertsNotNoted, match=r"layer 2: .* shape \[3, 2\] for 2 tokens, 2 each"):
        slots().note(2, torch.zeros(3, 2), torch.tensor([0, 1]))


def test_layers_with_experts_are_found_by_the_routers_of_the_model(tokenizer: Any) -> None:
    sizes = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
    found = ExpertLayers.of(family_model("qwen3_moe", tokenizer, **sizes))
    assert found is not None
    assert (found.numbers, found.per_token) == ([0, 2], 2)
    later = ExpertLayers.of(family_model("deepseek_v3", tokenizer))
    assert later is not None
    assert later.numbers == [1]
    assert ExpertLayers.of(family_model("qwen3", tokenizer)) is None
    with pytest.raises(UnsupportedRouting, match="no router of it was found"):
        ExpertLayers.of(family_model("phimoe", tokenizer))


def test_a_vllm_that_tells_no_part_of_a_requests_experts_is_refused() -> None:
    refuse_without_experts("0.32.0", SimpleNamespace(routed_experts_prompt_start=0))
    with pytest.raises(VllmUnavailable, match=r"vLLM 0.18.0 has no .*install vLLM 0.32.0"):
        refuse_without_experts("0.18.0", SimpleNamespace())


def replaying(build_config: Any, vllm: dict[str, Any], **sections: Any) -> Any:
    generator = {"engine": "vllm", "max_new_tokens": 64, "vllm": vllm}
    return build_config(
        trainer={"moe": {"router_replay": True}},
        generator=generator,
        policy={"head_dim": 32},
        **sections,
    )


def test_on_a_gpu_vllm_is_asked_and_on_a_cpu_our_worker(build_config: Any) -> None:
    on_cpu, on_gpu = replaying(build_config, {}), replaying(build_config, {}, placement=ON_GPU)
    check_vllm_fits(on_cpu)
    check_vllm_fits(on_gpu)
    assert expert_arguments(on_cpu) == {}
    assert expert_arguments(on_gpu) == {"enable_return_routed_experts": True}
    runner = "VLLM_USE_V2_MODEL_RUNNER"
    assert process_environment(on_cpu)[runner] == "0"
    assert runner not in process_environment(on_gpu)


@pytest.mark.parametrize(
    ("vllm", "placement", "why"),
    [
        (
            {"enforce_eager": False},
            {},
            "enforce_eager is false .* compiled layers report no experts",
        ),
        ({"engine_args": {"async_scheduling": True}}, {}, "async_scheduling is true .*remove it"),
        ({"enable_prefix_caching": False}, ON_GPU, "enable_prefix_caching is false .* to true"),
    ],
)
def test_settings_under_which_experts_are_not_told_are_refused(
    vllm: dict[str, Any], placement: Any, why: str, build_config: Any
) -> None:
    with pytest.raises(VllmUnavailable, match=why):
        check_vllm_fits(replaying(build_config, vllm, placement=placement))
    other = ON_GPU if not placement else {}
    check_vllm_fits(replaying(build_config, vllm, placement=other))


@pytest.mark.parametrize("name", ["enable_return_routed_experts", "aux_output_config"])
def test_replay_alone_decides_whether_experts_are_told(name: str, build_config: Any) -> None:
    with pytest.raises(ValidationError, match=f"engine_args.{name} is 1 but follows from trainer"):
        replaying(build_config, {"engine_args": {name: 1}})
