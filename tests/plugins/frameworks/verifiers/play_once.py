"""Plays one task by verifiers against a base URL, and prints the branches of its trace as JSON.

Runs in the environment of verifiers: play_once.py ENV CLIENT, both JSON; the key is in API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def main(env_config: dict[str, Any], client: dict[str, Any]) -> None:
    env = load_environment(resolve_env_config(env_config))
    kind = {"eval": EvalClientConfig, "train": TrainClientConfig}[client.pop("type")]
    context = ModelContext(model="policy", client=kind(api_key_var="API_KEY", **client))
    async with env.serving():
        (slot,) = env.slots(next(iter(env.taskset)))
        episode = await env.run_slot(slot, context)
    (trace,) = episode.traces
    told = {
        "session": trace.id,
        "errors": [error.message for error in trace.errors],
        "reward": trace.reward,
        "branches": [
            {"ids": one.token_ids, "sampled": one.sampled_mask, "logprobs": one.logprobs}
            for one in trace.branches
        ],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), json.loads(sys.argv[2])))
