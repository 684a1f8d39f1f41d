"""Parts of `gpu_day.py` about the trainer's step: its speed, prefix trees, and its memory.

`step` trains as many layers of an 8B's shapes as fit, `tree` rollouts that begin alike, once as a
tree and once as branches, `memory` cases of `trainer_memory.py` compared with the estimate.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_limits import GIB, compute_dtype, peak_bytes, reset_peak, seconds
from gpu_parts import Bench, Row, Size, random_model
from gpu_profile import explained
from measuring import policy_step, random_sequences
from torch.utils._python_dispatch import TorchDispatchMode

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import shard
from composer_mesh.actors.models.trained_model import wrap_layers
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

SEQUENCES = 8
MICROBATCHES = 1
"""Of a step: all tokens are one."""
STEP_BAR, TREE_BAR, UNIQUE_BAR, MEMORY_BAR = 0.5, 3.75, 1.05, 0.1
WAYS: dict[str, dict[str, Any]] = {
    "checkpointed": {"activation_checkpointing": True},
    "activations offloaded": {"activation_checkpointing": True, "activation_offload": True},
    "checkpointed, compiled": {"activation_checkpointing": True, "compile": True},
    "kept, compiled": {"compile": True},
}
"""Settings of [trainer]; where activations are kept, a third of the layers fits."""
LEAVES, PROMPT, ANSWER = 20, 6144, 256
"""Of the tree: rollouts, tokens that all begin with, and tokens that each has alone."""
MEMORY_CASES = ("checkpointing", "activation_offload", "optimizer_offload")


def step(bench: Bench) -> Iterator[Row]:
    """Measure steps of the policy loss, by FSDP2 in bfloat16, in several ways.

    Nothing is compiled for a CPU, which takes a minute.
    """
    size, device = bench.size, bench.device
    for way, settings in WAYS.items():
        trainer = settings | {"compile": "compile" in settings and device.type == "cuda"}
        kept = "activation_checkpointing" not in trainer
        layers = max(1, layers_of(bench) // (3 if kept else 1))
        reset_peak(device)
        train = stepper(bench, layers, trainer, _sequences(size), size.tokens // SEQUENCES * 3 // 4)
        took = seconds(train, device, 2)
        name = f"FSDP2 step, {way}, {layers} layers, {size.tokens:,} tokens"
        row = Row(name, flops(size, layers) / took, "TFLOP/s", bench.limits.matmul_tflops, STEP_BAR)
        yield explained(bench, row, train)
        waits = synchronizations(bench, train)
        yield Row(f"{name}: waits of the host in a step", waits, "", MICROBATCHES)
        if (peak := peak_bytes(device)) is not None:
            whole = torch.cuda.mem_get_info(device)[1]
            yield Row(f"{name}: memory", peak / GIB, "GiB", whole / GIB)
        del train
        free()


def tree(bench: Bench) -> Iterator[Row]:
    """Measure a step of rollouts that share their prompt: as a tree, and each by itself."""
    size, device = bench.size, bench.device
    layers, took, unique = max(1, layers_of(bench) // 4), {}, 0.0
    prompt, answer = _tree_lengths(size)
    (shared,) = random_sequences(1, prompt, size.vocabulary)
    own = random_sequences(LEAVES, answer, size.vocabulary)
    for way, sharing in (("tree", True), ("branches", False)):
        trainer = {
            "prefix_sharing": sharing,
            "attention": "flex" if sharing and device.type == "cuda" else "sdpa",
            "activation_checkpointing": True,
            "microbatch_tokens": (prompt + answer) * (LEAVES if sharing else 2),
        }
        reset_peak(device)
        train = stepper(bench, layers, trainer, [shared + one for one in own], answer)
        if sharing:
            unique = float(train()["tokens/computed_over_unique"] or 0.0)
        took[way] = seconds(train, device, 2)
        del train
        free()
    name = f"tree of {LEAVES} leaves, {prompt:,} shared and {answer} own tokens"
    speed = took["branches"] / took["tree"]
    yield Row(f"{name}: times faster than branches", speed, "x", 1.0, TREE_BAR)
    yield Row(f"{name}: computed tokens over unique", unique, "", 1.0, UNIQUE_BAR, at_most=True)


def memory(bench: Bench) -> Iterator[Row]:
    """Measure how far the trainer's peak of GPU memory is from `composer-mesh check`'s estimate.

    A CPU has neither: of one case the difference is then 0.
    """
    script = Path(__file__).with_name("trainer_memory.py")
    dry = ["--dry"] * (bench.device.type == "cpu")
    names = MEMORY_CASES[:1] if dry else MEMORY_CASES
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory.json"
        cases = [word for name in names for word in ("--case", name)]
        subprocess.run([sys.executable, script, *cases, "--json", file, *dry], check=True)
        figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    for name in names:
        measured, estimated = (figures[f"{name}: {what}, GB"] for what in ("measured", "estimated"))
        difference = abs(measured - estimated) if measured else 0.0
        named = f"{name}: difference of the peak to its estimate"
        yield Row(named, difference, "GiB", estimated or 1.0, MEMORY_BAR, at_most=True)


def free() -> None:
    """Free a model that nothing refers to but itself and what was compiled for it."""
    torch.compiler.reset()
    gc.collect()


def synchronizations(bench: Bench, call: Callable[[], object]) -> int:
    """Return how often a call waits for the device; on a CPU, how often it reads a tensor."""
    if bench.device.type == "cpu":
        with Reads() as reads:
            call()
        return reads.count
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in found)


class Reads(TorchDispatchMode):
    """Counts the operators that a device would have to finish first: numbers, places, masks."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        self.count += masked or name in self.OPERATORS
        return func(*args, **(kwargs or {}))


def stepper(
    bench: Bench, layers: int, trainer: dict[str, Any], sequences: list[list[int]], sampled: int
) -> Callable[[], dict[str, float | None]]:
    """Return what trains a step on some sequences, with settings of [trainer].

    It raises AssertionError for a gradient whose norm is 0 or not finite.
    """
    flex = trainer.get("attention") == "flex"
    bench = replace(bench, attention="flex_attention") if flex else bench
    config = _config(bench, trainer, max(map(len, sequences)))
    model = random_model(bench, layers, torch.float32)
    wrap_layers(model, config.trainer)
    ranks = Ranks(device=bench.device)
    shard(model, ranks.mesh(), compute_dtype(bench.device))
    step = OptimizerStep(model, None, config, ranks)
    batch: StepBatch = policy_step(sequences, sampled)

    def train() -> dict[str, float | None]:
        metrics = step.run(batch, None)
        norm = float(metrics["policy/grad_norm"] or 0.0)
        if not 0 < norm < float("inf"):
            raise AssertionError(f"the gradient's norm is {norm}, but must be finite and above 0")
        return metrics

    return train


def _config(bench: Bench, trainer: dict[str, Any], longest: int) -> Config:
    size = bench.size
    return Config.model_validate(
        {
            "run": {"name": "gpu-day", "steps": 3},
            "data": {"task": "toolbox"},
            "policy": {"max_context": longest},
            "generator": {"max_new_tokens": 16},
            "trainer": {"microbatch_tokens": size.tokens, "sharding": "none", **trainer},
            "sdpo": {"alpha": 0.0},
            "replay": {"beta": 0.0},
            "placement": {"trainer": {"gpus": int(bench.device.type == "cuda")}},
        }
    )


def layers_of(bench: Bench) -> int:
    """Return how many layers train with their optimizer's state."""
    if bench.device.type == "cpu":
        return bench.size.most_layers
    return bench.size.layers_that_train(torch.cuda.mem_get_info(bench.device)[1])


def flops(size: Size, layers: int) -> float:
    """Return the TFLOPs of a step's mathematics, forward and backward."""
    length = size.tokens // SEQUENCES
    weights = layers * size.layer_weights + size.vocabulary * size.hidden
    attended = 2 * layers * size.heads * size.head_dim * length * size.tokens
    return (6 * weights * size.tokens + 3 * attended) / 1e12


def _sequences(size: Size) -> list[list[int]]:
    return random_sequences(SEQUENCES, size.tokens // SEQUENCES, size.vocabulary)


def _tree_lengths(size: Size) -> tuple[int, int]:
    scale = 1 if size.tokens >= LEAVES * ANSWER else 64
    return PROMPT // scale, ANSWER // scale


PARTS = {"step": step, "tree": tree, "memory": memory}
