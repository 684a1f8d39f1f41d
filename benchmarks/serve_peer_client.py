"""Steps and samples through the Tinker SDK against the server at an address.

    python serve_peer_client.py URL BASE_MODEL CLIENTS STEPS SAMPLES

Runs in an environment with the SDK, and imports nothing of this project. Each client trains a
model of its own; a step is forward_backward of four sequences of 48 tokens, and optim_step. Prints
JSON: steps/s of one client and of all at once, samples/s of 16 tokens one after another and all at
once, and the seconds until everything was compiled.
"""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from tinker import types

SEQUENCES, LENGTH, PROMPT, SAMPLED = 4, 48, 40, 16
WARM_UP = 3


def data_of(seed: int) -> list[types.Datum]:
    draw = random.Random(seed)

    def one() -> types.Datum:
        tokens = [draw.randrange(3, 200) for _ in range(LENGTH + 1)]
        targets = {"data": tokens[1:], "dtype": "int64", "shape": [LENGTH]}
        weights = {"data": [1.0] * LENGTH, "dtype": "float32", "shape": [LENGTH]}
        inputs = {
            "target_tokens": types.TensorData(**targets),
            "weights": types.TensorData(**weights),
        }
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )

    return [one() for _ in range(SEQUENCES)]


def step(model: Any, seed: int) -> None:
    loss = model.forward_backward(data_of(seed), "cross_entropy")
    update = model.optim_step(types.AdamParams(learning_rate=1e-3))
    loss.result()
    update.result()


def steps(model: Any, count: int) -> None:
    for number in range(count):
        step(model, number)


def steps_per_s(pool: ThreadPoolExecutor, models: list[Any], count: int) -> float:
    begun = time.perf_counter()
    list(pool.map(lambda model: steps(model, count), models))
    return len(models) * count / (time.perf_counter() - begun)


def sample(sampler: Any, seed: int) -> Any:
    prompt = types.ModelInput.from_ints([3 + (seed + place) % 190 for place in range(PROMPT)])
    params = types.SamplingParams(max_tokens=SAMPLED, temperature=1.0, seed=seed)
    return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)


def main(url: str, base_model: str, clients: int, count: int, samples: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    begun = time.perf_counter()
    models = [
        service.create_lora_training_client(base_model=base_model, rank=8, seed=number)
        for number in range(clients)
    ]
    with ThreadPoolExecutor(clients) as pool:
        steps_per_s(pool, models[:1], WARM_UP)
        steps_per_s(pool, models, WARM_UP)
        sampler = models[0].save_weights_and_get_sampling_client(name="sampled")
        for _ in range(WARM_UP):  # JAX compiles for each size of a batch
            for one in [sample(sampler, number) for number in range(samples)]:
                one.result()
        sample(sampler, 0).result()
        ready_s = time.perf_counter() - begun
        alone, together = steps_per_s(pool, models[:1], count), steps_per_s(pool, models, count)
    begun = time.perf_counter()
    for number in range(samples // 4):
        sample(sampler, number).result()
    one_by_one = samples // 4 / (time.perf_counter() - begun)
    begun = time.perf_counter()
    tokens = sum(
        len(answer.result().sequences[0].tokens)
        for answer in [sample(sampler, number) for number in range(samples)]
    )
    took = time.perf_counter() - begun
    figures = {
        "ready_s": ready_s,
        "steps_per_s": alone,
        "steps_per_s_at_once": together,
        "samples_per_s": one_by_one,
        "samples_per_s_at_once": samples / took,
        "tokens_per_s_at_once": tokens / took,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
