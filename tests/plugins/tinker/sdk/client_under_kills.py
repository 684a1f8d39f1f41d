"""One client that trains and samples for some rounds, whatever dies meanwhile."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from acceptance import datum, done
from tinker import types


def main(url: str, number: int, rounds: int) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = done(service.create_lora_training_client("quickstart", rank=4, seed=number))
    losses: list[Any] = []
    for step in range(rounds):
        seed = 1000 * number + 10 * step
        asked = [
            training.forward_backward([datum(seed + n, 10 + n)], "cross_entropy") for n in range(2)
        ]
        asked.append(training.optim_step(types.AdamParams(learning_rate=1e-3)))
        losses.append(asked[0].result().metrics["loss:sum"])
        for one in asked[1:]:
            one.result()
        if step % 5 == number % 5:
            sampler = done(training.save_weights_and_get_sampling_client())
            settings = types.SamplingParams(max_tokens=4, seed=step)
            found = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, settings).result()
            assert len(found.sequences) == 1
        print(json.dumps({"step": step}), flush=True)
    path = training.save_state("end").result().path
    print(json.dumps({"model": training.model_id, "steps": rounds, "path": path}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
