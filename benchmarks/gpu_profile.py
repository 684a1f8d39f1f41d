"""Where the time of a measurement goes that misses its bar: kernels and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpu_limits import synchronize
from gpu_parts import Bench, Row
from torch.profiler import ProfilerActivity, profile

MOST, LONGEST = 8, 120
"""Kernels that are stored, and letters of a name."""


def explained(bench: Bench, row: Row, call: Callable[[], object]) -> Row:
    """Return the row, where its bar is not met with the kernels of one call; a CPU shows all."""
    cuda = bench.device.type == "cuda"
    if row.bar is None or (cuda and row.met):
        return row
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    with profile(activities=activities, with_flops=True) as profiler:
        call()
        synchronize(bench.device)
    return replace(row, profile=shares(profiler.key_averages(), bench.limits.matmul_tflops, cuda))


def shares(events: Any, tflops: float, cuda: bool) -> list[dict[str, Any]]:
    """Return the kernels with the largest shares of the time, then the operators with products.

    `of_limit` is the part of the matrix limit that an operator's products reached; None for a
    kernel, whose products are not known.
    """
    took = [(float(_device_us(one) if cuda else one.self_cpu_time_total), one) for one in events]
    took = sorted((one for one in took if one[0] > 0), key=lambda one: -one[0])
    kernels = [one for one in took if not cuda or one[1].device_type.name == "CUDA"]
    total = sum(time for time, _ in kernels) or 1.0
    operators = [one for one in took if one[1].flops and one[1].device_type.name == "CPU"]
    return [
        {"name": one.key[:LONGEST], "share": time / total, "of_limit": None}
        for time, one in kernels[:MOST]
    ] + [
        {
            "name": one.key[:LONGEST],
            "share": time / total,
            "of_limit": one.flops / (time * 1e6) / tflops,
        }
        for time, one in operators[:MOST]
    ]


def _device_us(event: Any) -> float:
    return float(event.self_device_time_total)
