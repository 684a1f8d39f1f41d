"""The part `fp8` of `gpu_day.py`: speed and mismatch of FP8 weights of the embedded engine.

Speed is compared with the same model in bfloat16. The mismatch is that of sampled tokens with the
bfloat16 model's own forward, which a trainer would compute, as KL from the sampler to it (k3), and
is shown with one that was published.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from gpu_parts import Bench, Row, decoding_rate

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.embedded_decode import CudaGraphs
from composer_mesh.actors.engines.fp8 import Fp8NotServed, quantize_model
from composer_mesh.rollouts.generation import GenerationRequest

SAMPLES, PROMPT = 8, 32
PUBLISHED_KL = 0.0038
"""Nats at the first step of FP8 rollouts with exact scales, of a trained model (prime-rl, PR 3112);
random weights are no trained model."""


def compared(bench: Bench, model_of: Callable[[], Any]) -> list[Row]:
    """Measure the model that `model_of` returns in bfloat16 and with FP8 weights.

    Leaves the part out, with the reason, on a GPU that does not multiply E4M3.
    """
    plain, quantized = model_of(), model_of()
    try:
        quantize_model(quantized)
    except Fp8NotServed as error:
        print(f"fp8: left out, {error}")
        return []
    engines = {name: _engine(bench, one) for name, one in (("plain", plain), ("fp8", quantized))}
    rates = {name: decoding_rate(bench, engine) for name, engine in engines.items()}
    kls = {name: _mismatch(bench, engine, plain) for name, engine in engines.items()}
    if not 0 < kls["fp8"] < 1:
        raise AssertionError(f"the mismatch KL of FP8 weights is {kls['fp8']:.3g} nats")
    at_once = bench.size.concurrent
    return [
        Row(f"FP8 weights, {at_once} at once", rates["fp8"], "tokens/s", rates["plain"]),
        Row("mismatch KL, FP8 weights", kls["fp8"], "nats", PUBLISHED_KL),
        Row("mismatch KL, bfloat16", kls["plain"], "nats", PUBLISHED_KL),
    ]


def _engine(bench: Bench, model: Any) -> EmbeddedEngine:
    capture = CudaGraphs() if bench.device.type == "cuda" else None
    length = PROMPT + bench.size.new_tokens
    return EmbeddedEngine(model, bench.size.concurrent, length, prefix_tokens=0, capture=capture)


def _mismatch(bench: Bench, engine: EmbeddedEngine, trained: Any) -> float:
    """Return the KL in nats from what an engine samples to the forward of a model."""
    rng, done = random.Random(1), list[Any]()
    prompts = {
        str(number): [rng.randrange(bench.size.vocabulary) for _ in range(PROMPT)]
        for number in range(SAMPLES)
    }
    for name, prompt in prompts.items():
        request = GenerationRequest(name, prompt, bench.size.new_tokens, 1.0, int(name), [])
        engine.submit(request, done.append)
    while engine.busy:
        engine.step()
    ids = torch.tensor([prompts[one.request_id] + one.token_ids for one in done])
    sampled = torch.tensor([one.logprobs for one in done])
    with torch.inference_mode():
        logits = trained(input_ids=ids.to(bench.device), use_cache=False).logits
        logprobs = logits[:, PROMPT - 1 : -1].float().log_softmax(-1).cpu()
    away = logprobs.gather(-1, ids[:, PROMPT:, None])[..., 0] - sampled
    return float((away.exp() - 1 - away).mean())
