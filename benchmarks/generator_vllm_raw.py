"""The raw side of generator_vllm.py: vLLM with its own engine loop, in a separate process.

Reads one seed per line and writes, for each, the tokens and seconds of serving that seed's
requests. Engine arguments, sampling parameters and requests are those of the actor.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.generation import GenerationRequest

CONCURRENT = 64
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
SIZES = {
    "tiny": {"layers": 2, "hidden_size": 128, "intermediate_size": 256, "heads": 4, "kv_heads": 2},
    "small": {"layers": 4, "hidden_size": 256, "intermediate_size": 512, "heads": 8, "kv_heads": 4},
}


@dataclass(frozen=True)
class Load:
    """Concurrent requests, more than are decoded together, and new tokens of each request."""

    size: str
    requests: int
    new: int

    @property
    def config(self) -> Config:
        """A run with this model on vLLM."""
        keys = {f"policy.{key}": value for key, value in SIZES[self.size].items()}
        keys |= {"policy.head_dim": 32, "generator.max_concurrent": CONCURRENT}
        return load_config(
            QUICKSTART,
            ["generator.engine=vllm", *(f"{key}={value}" for key, value in keys.items())],
        )

    def requests_of(self, seed: int) -> list[GenerationRequest]:
        """Return requests that are unique to a seed, so that no prefix cache has them."""
        rng = random.Random(seed)
        return [
            GenerationRequest(
                f"{seed}-{index}",
                [rng.randrange(256) for _ in range(rng.randint(16, 96))],
                self.new,
                1.0,
                rng.randrange(1 << 40),
                [],
            )
            for index in range(self.requests)
        ]


def serve(llm: Any, sampling: Any, requests: Sequence[GenerationRequest]) -> int:
    """Submit everything, then step until nothing is left; return the number of tokens."""
    for request in requests:
        prompt = {"prompt_token_ids": request.prompt_ids}
        llm.add_request(request.request_id, prompt, sampling(request))
    tokens = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            tokens += len(output.outputs[0].token_ids)
    return tokens


def main() -> None:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from composer_mesh.actors.engines.vllm_settings import engine_arguments
    from composer_mesh.actors.engines.vllm_start import sampling_parameters

    size, requests, new, folder = sys.argv[1:]
    load = Load(size, int(requests), int(new))
    arguments = engine_arguments(load.config, Path(folder))
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    sampling = sampling_parameters()
    for line in sys.stdin:
        batch = load.requests_of(int(line))
        began = time.perf_counter()
        tokens = serve(llm, sampling, batch)
        seconds = time.perf_counter() - began
        sys.stdout.write(json.dumps({"tokens": tokens, "seconds": seconds}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
