"""Generator actors in processes, for generator benchmarks: any engine, one small model."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from generator_vllm_raw import QUICKSTART, SIZES

from composer_mesh.actors.engines.vllm_settings import GB, AttentionShape, process_environment
from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Ask = Callable[[GenerationRequest], Awaitable[GenerationResult]]
DEADLINE_S = 600.0


def prefix_config(engine: str, rows: int, context: int, kept: int) -> Config:
    """Return a run whose generators keep `kept` tokens besides those of `rows` requests."""
    keys = {f"policy.{key}": value for key, value in SIZES["tiny"].items()}
    keys |= {"policy.head_dim": 32, "policy.max_context": context}
    keys |= {"generator.max_concurrent": rows, "generator.prefix_tokens": kept}
    given = [f"generator.engine={engine}", *(f"{key}={value}" for key, value in keys.items())]
    config = load_config(QUICKSTART, given)
    shape = AttentionShape.of(config.policy)
    tokens = kept + (rows + 1) * context
    gigabytes = shape.cache_bytes(tokens, 4) / GB
    return load_config(QUICKSTART, [*given, f"generator.vllm.kv_cache_gb={gigabytes}"])


@asynccontextmanager
async def actors(config: Config, count: int) -> AsyncIterator[tuple[Path, list[Ask]]]:
    """Yield the folder of a model, and calls to `count` actors that serve it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
        policy.save_policy(policy.build_model(config.policy, tokenizer, 1), tokenizer, folder)
        env = {"OMP_NUM_THREADS": "1", **process_environment(config)}
        async with MeshHost(Supervisor()) as host:
            asks: list[Ask] = []
            for number in range(count):
                actor = await host.spawn(f"generator-{number}", GeneratorActor, env=env)
                await actor.call("load", config, folder, deadline_s=DEADLINE_S)
                asks.append(partial(actor.call, "generate", deadline_s=DEADLINE_S))
            yield folder, asks
