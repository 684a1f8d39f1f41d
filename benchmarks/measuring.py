"""What several benchmarks measure with: ways in turns, peaks of memory, random models."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from composer_mesh.rollouts.batches import StepBatch

T = TypeVar("T")
MIB = 1 << 20


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, after a round that is not counted.

    Ways alternate, so that other load of the machine affects all of them.
    """
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began = clock()
            way()
            took[name].append(clock() - began)
    return {name: times[1:] for name, times in took.items()}


def in_a_process(work: Callable[..., T], *args: object) -> T:
    """Return the result of work in a fresh process, whose peak of memory is that of the work."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def reset_peak(device: str = "cpu") -> int:
    """Begin to measure the peak of memory; return the bytes that are held now."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_bytes()


def peak_bytes(device: str = "cpu") -> int:
    """Return the most bytes that this process has held since `reset_peak`, on Linux."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def random_qwen3(sizes: Mapping[str, Any], device: str = "cpu", **how: Any) -> Any:
    """Return a Qwen3 of random weights; `how` are further arguments of `from_config`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen3Config(**sizes), **how)


def random_sequences(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return sequences of random ids."""
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def policy_step(sequences: Sequence[list[int]], sampled: int, version: int = 0) -> StepBatch:
    """Return a step of the policy channel, of whose sequences the last ids were sampled."""
    from composer_mesh.rollouts.batches import PolicySample, StepBatch

    samples = []
    for number, ids in enumerate(sequences):
        read = len(ids) - sampled
        samples.append(
            PolicySample(
                str(number),
                ids,
                [False] * read + [True] * sampled,
                [0.0] * read + [-8.0] * sampled,
                1.0 if number % 2 else -1.0,
                [-1] * read + [version] * sampled,
            )
        )
    return StepBatch(version, samples, [], [])
