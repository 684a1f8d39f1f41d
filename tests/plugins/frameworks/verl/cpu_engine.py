"""verl's FSDP2 engine on a CPU: a platform for it, which verl has none of, and an engine."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = dict.fromkeys(
    ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    lambda *_: 0,
)


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of an accelerator, where there is none."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **MEMORY,
        is_available=lambda: True,
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        mem_get_info=lambda *_: (0, 0),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def engine_on_cpu(folder: Path, lr: float, tokens: int = 128) -> Any:
    """verl's engine over the policy in a folder, with SGD; microbatches of `tokens` at most."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device=["cpu"])(
        FSDPEngineWithLMHead
    )
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(folder),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            dtype="float32",
            max_token_len_per_gpu=tokens,
            use_remove_padding=False,
        ),
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD",
            optimizer_impl="torch.optim",
            lr=lr,
            weight_decay=0.0,
            clip_grad=1e9,
            lr_warmup_steps=0,
            total_training_steps=100,
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine
