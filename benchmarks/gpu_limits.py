"""What the hardware does at best, measured with plain torch: the limits of `gpu_day.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = 1 << 30
NOMINAL = {
    "H100": (989.0, 3350.0),
    "H200": (989.0, 4800.0),
    "A100": (312.0, 2039.0),
    "B200": (2250.0, 8000.0),
    "L40S": (362.0, 864.0),
}
"""Dense bfloat16 TFLOP/s and GB/s of memory, from the makers' data sheets."""


@dataclass(frozen=True)
class Limits:
    """Measured limits; copies count the bytes that are copied once, memory those read and written.

    On a CPU, matrices are float32 and a copy to the host is one in its own memory.
    """

    matmul_tflops: float
    memory_gb_s: float
    to_host_gb_s: float
    to_device_gb_s: float

    @classmethod
    def measured(cls, device: torch.device, side: int, nbytes: int) -> Limits:
        """Multiply square matrices of `side`, and copy `nbytes`."""
        dtype = compute_dtype(device)
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        other = torch.empty_like(source)
        host = host_memory(nbytes, device)
        gb = nbytes / 1e9
        return cls(
            2 * side**3 / 1e12 / seconds(lambda: left @ right, device, 10),
            2 * gb / seconds(lambda: other.copy_(source), device, 10),
            gb / seconds(lambda: host.copy_(source, non_blocking=True), device, 5),
            gb / seconds(lambda: source.copy_(host, non_blocking=True), device, 5),
        )


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the type that models compute in there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of the host that the device copies to at its full speed."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def nominal(device: torch.device) -> tuple[str, tuple[float, float] | None]:
    """Return the device's name, and its nominal TFLOP/s and GB/s where they are known."""
    if device.type == "cpu":
        return "CPU", None
    name = torch.cuda.get_device_name(device)
    return name, next((found for key, found in NOMINAL.items() if key in name), None)


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call after one that warms up, with all that it queued done."""
    took = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        synchronize(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that torch has held since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> int:
    """Begin to measure the peak; return what is held now."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
