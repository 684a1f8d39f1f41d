"""FP8 weights: exactly E4M3 with a scale for each row, in the decoder's linear layers alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_requests import Plain, ask, assert_faithful, serve
from transformers import MixtralConfig, MixtralForCausalLM

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.fp8 import (
    Fp8Linear,
    Fp8NotServed,
    load_weights,
    quantize_model,
    quantize_rows,
    refuse_old_gpu,
)
from composer_mesh.mesh.weights.manifest import WeightsMismatch


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float() * scale


def codes_nearest(values: torch.Tensor) -> torch.Tensor:
    """The closest of all finite E4M3 values, of two the one whose last bit is 0."""
    bits = torch.tensor([*range(127), *range(129, 255)], dtype=torch.uint8)  # no NaN, one zero
    table = bits.view(torch.float8_e4m3fn).float()
    away = (values[..., None] - table).abs().double() + (bits % 2) * 1e-12
    return table[away.argmin(-1)]


def tensors_of(layer: Fp8Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight, layer.scale


def test_rows_are_rounded_to_the_nearest_code_of_their_own_scale() -> None:
    values = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 10
    values[3], values[4, 5] = 0.0, 1000.0
    codes, scale = quantize_rows(values)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (7, 1))
    largest = values.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale[largest > 0], (largest / 448)[largest > 0])
    assert torch.equal(codes.float(), codes_nearest(values / scale))
    assert (dequantized(codes, scale) - values).abs().le(largest / 16).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other(broken: float) -> None:
    values = torch.randn(3, 16)
    expected = dequantized(*quantize_rows(values))
    values[1, 2] = broken
    found = dequantized(*quantize_rows(values))
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_layer_multiplies_what_codes_and_scales_stand_for() -> None:
    layer = Fp8Linear(torch.nn.Linear(64, 32).bfloat16())
    inputs = torch.randn(2, 5, 64).bfloat16()
    exact = dequantized(*quantize_rows(inputs)) @ dequantized(*tensors_of(layer)).t()
    expected = exact.bfloat16() + layer.bias
    torch.testing.assert_close(layer(inputs), expected, atol=0.02, rtol=0.02)


@pytest.fixture
def build(build_model: Any) -> Any:
    return lambda seed: build_model(seed).bfloat16()


def test_head_embeddings_and_norms_keep_their_type(build: Any) -> None:
    model = quantize_model(build(1))
    kinds = {name: one.dtype for name, one in model.state_dict().items()}
    kept = {name.rpartition(".")[0].rpartition(".")[2] for name in kinds if "proj" not in name}
    assert not any("proj" in one for one in kept)
    for name, dtype in kinds.items():
        wanted = torch.bfloat16
        if "proj" in name:
            wanted = torch.float32 if name.endswith("scale") else torch.float8_e4m3fn
        assert dtype == wanted, name


def test_tokens_are_sampled_from_the_quantized_model_and_labelled_with_their_version(
    build: Any, rng: random.Random
) -> None:
    """In-place updates quantize again: an engine that had served other weights gives equal bits."""
    newer = build(2)
    engine = EmbeddedEngine(quantize_model(build(1)), 4, 64)
    requests = [ask(f"r{n}", [rng.randrange(300) for _ in range(9)], seed=n) for n in range(6)]
    serve(engine, requests)
    places = [one.data_ptr() for one in engine._model.buffers()]
    engine.swap(Plain(7, newer.state_dict()))
    results = serve(engine, requests)
    assert places == [one.data_ptr() for one in engine._model.buffers()]
    expected = serve(EmbeddedEngine(quantize_model(build(2)), 4, 64, version=7), requests)
    assert results == expected


def test_weights_that_do_not_fit_or_are_missing_are_refused(build: Any) -> None:
    model, state = quantize_model(build(1)), build(2).state_dict()
    name = next(name for name in state if "q_proj" in name)
    with pytest.raises(WeightsMismatch, match=r"q_proj.weight is missing"):
        load_weights(model, Plain(1, {key: one for key, one in state.items() if key != name}))
    with pytest.raises(WeightsMismatch, match=r"q_proj.weight of shape \[1, 2\] was published"):
        load_weights(model, Plain(1, state | {name: torch.zeros(1, 2)}))


def test_mixtures_small_layers_and_old_gpus_are_refused(build_config: Any, tokenizer: Any) -> None:
    from composer_mesh.actors.models import policy

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    mixture = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_attention_heads=4, **sizes))
    with pytest.raises(Fp8NotServed, match="is a mixture"):
        quantize_model(mixture)
    odd = build_config(policy={"hidden_size": 24, "intermediate_size": 40, "head_dim": 6})
    with pytest.raises(Fp8NotServed, match="multiples of 16"):
        quantize_model(policy.build_model(odd.policy, tokenizer, seed=0))
    with pytest.raises(Fp8NotServed, match=r"capability 8\.0, and FP8 needs"):
        refuse_old_gpu("A100", (8, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_gpu_multiplies_the_same_codes(build: Any) -> None:
    refuse_old_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    layer = Fp8Linear(torch.nn.Linear(64, 32).bfloat16())
    inputs = torch.randn(5, 64).bfloat16()
    there = Fp8Linear(torch.nn.Linear(64, 32).bfloat16()).cuda()
    there.load_state_dict(layer.state_dict())
    torch.testing.assert_close(there(inputs.cuda()).cpu(), layer(inputs), atol=0.02, rtol=0.02)
    one = ask("r", [1, 2, 3])
    served = quantize_model(build(1).cuda())
    result = serve(EmbeddedEngine(served, 2, 64), [one])["r"]
    assert_faithful(served, one, result)
