"""Actors that tell what they have of their host, and how much memory a training step took."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor


class PlacedActor(MeshActor):
    """Tells what the kernel and torch let it use."""

    kind: ClassVar[str] = "placed"

    @concurrent_endpoint
    async def has(self) -> dict[str, Any]:
        return await asyncio.to_thread(resources)

    @concurrent_endpoint
    async def trained(self, sizes: dict[str, Any], tokens: int, context: int) -> int:
        """Bytes of its own memory after a step of a policy loss over so many tokens."""
        return await asyncio.to_thread(memory_after_a_step, sizes, tokens, context)


def resources() -> dict[str, Any]:
    """What the kernel and torch let this process use."""
    import torch

    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": torch.get_num_threads(),
    }


def memory_after_a_step(sizes: dict[str, Any], tokens: int, context: int) -> int:
    """Train one step of a policy loss over so many tokens; return this process's own memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from composer_mesh.actors.models.language_model import LanguageModel
    from composer_mesh.losses.fused import linear_logprobs

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
    optimizer, parts = torch.optim.AdamW(model.parameters()), LanguageModel(model)
    ids = torch.randint(0, sizes["vocab_size"], (tokens // context, context))
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    rows = hidden.reshape(-1, hidden.shape[-1])
    linear_logprobs(rows, parts.weight, ids.reshape(-1)).sum().backward()
    optimizer.step()
    return own_memory()


def own_memory() -> int:
    """The most that this process has had at once, without the code that it shares with others."""
    status = Path("/proc/self/status").read_text()
    peak, files = (
        int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
        for name in ("VmHWM", "RssFile")
    )
    return peak - files
