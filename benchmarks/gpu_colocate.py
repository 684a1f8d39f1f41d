"""The part `colocate` of `gpu_day.py`: trainer and engine give up a GPU to each other, and back.

An 8B's float32 weights and two moments are moved by what a trainer uses, and the engine frees its
cache and takes the weights that replace its own. Where a card holds fewer layers, the seconds are
those of as many bytes as all layers have, at the measured rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from gpu_limits import compute_dtype, host_memory, synchronize
from gpu_parts import Bench, Row, random_model
from torch import Tensor

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.models.device_memory import DeviceMemory
from composer_mesh.rollouts.generation import GenerationRequest

SECONDS = 2.0
"""The bar for a switch, each way."""
MOVED_BYTES = 12
"""Of each trained weight: in float32, and two moments."""
MOST_OF_MEMORY = 0.4
"""Part of the card's memory that is moved; as much must be pinned on the host."""


@dataclass
class Version:
    """A version of the weights in the host's memory, as a pull leaves it there."""

    tensors: dict[str, Tensor]
    version: int = 1

    def apply(self, model: Any, rate: float = 1.0) -> None:
        assert rate == 1.0
        own = model.state_dict()
        with torch.no_grad():
            for name, one in self.tensors.items():
                own[name].copy_(one, non_blocking=True)


def colocate(bench: Bench) -> list[Row]:
    """Measure both switches, trainer to engine and back, and check that no bit has changed."""
    size, device = bench.size, bench.device
    layers = _layers(bench)
    whole = MOVED_BYTES * (
        size.most_layers * size.layer_weights + 2 * size.vocabulary * size.hidden
    )
    shape = (layers * size.layer_weights + 2 * size.vocabulary * size.hidden,)
    tensors = [torch.empty(shape, device=device).normal_() for _ in range(MOVED_BYTES // 4)]
    sums = [one.double().sum().item() for one in tensors]
    moved, trainer = sum(one.nbytes for one in tensors), DeviceMemory(device)
    trainer.release(tensors)  # the first time also pins the host's memory
    engine, version = _engine(bench, layers)
    names = set(version.tensors)

    def to_training() -> None:
        engine.sleep(names)
        trainer.restore()

    def to_sampling() -> None:
        trainer.release(tensors)
        engine.wake(version)

    rows, limits = [], bench.limits
    for name, switch, limit in (
        ("to training", to_training, limits.to_device_gb_s),
        ("to sampling", to_sampling, limits.to_host_gb_s),
        ("to training", to_training, limits.to_device_gb_s),
    ):
        took = _seconds(switch, device)
        label = f"turn {name}, {layers} of {size.most_layers} layers"
        rows.append(Row(label, moved / 1e9 / took, "GB/s", limit))
        rows.append(Row(f"turn {name}, all layers", took * whole / moved, "s", SECONDS, 1.0, True))
    if [one.double().sum().item() for one in tensors] != sums:
        raise AssertionError("the trainer's state has other bits after two turns of the engine")
    return rows[2:]  # the first switch allocates what later ones find


def _layers(bench: Bench) -> int:
    """Return how many layers' states fit into a part of the card and of the host's memory."""
    if bench.device.type != "cuda":
        return bench.size.most_layers
    size = bench.size
    memory = MOST_OF_MEMORY * torch.cuda.mem_get_info(bench.device)[1] / MOVED_BYTES
    left = memory - 2 * size.vocabulary * size.hidden
    return max(1, min(size.most_layers, int(left / size.layer_weights)))


def _engine(bench: Bench, layers: int) -> tuple[EmbeddedEngine, Version]:
    """Return an engine that has answered, and a version in pinned memory for it."""
    size, done = bench.size, list[Any]()
    model = random_model(bench, layers, compute_dtype(bench.device)).eval()
    host = {}
    for name, one in model.state_dict().items():
        host[name] = host_memory(one.nbytes, bench.device).view(one.dtype).view(one.shape)
        host[name].copy_(one)
    engine = EmbeddedEngine(model, size.concurrent, 64, prefix_tokens=0)
    engine.submit(GenerationRequest("one", [1, 2, 3], 4, 1.0, 0, []), done.append)
    while engine.busy:
        engine.step()
    if len(done[0].token_ids) != 4:
        raise AssertionError("the engine has answered with fewer tokens than were requested")
    return engine, Version(host)


def _seconds(switch: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    began = perf_counter()
    switch()
    synchronize(device)
    return perf_counter() - began


PARTS = {"colocate": colocate}
