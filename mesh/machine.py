"""This machine as a host of a run: the cores, memory and GPUs that this process may use.

Reads the kernel's and NVIDIA driver's values, within the limits of a container or batch system.
Starts nothing and loads no CUDA, because `check` uses it too.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from composer_mesh.mesh.process_resources import VISIBLE
from composer_mesh.planning.host_capacity import HostResources

NAME = "localhost"
NVML = "libnvidia-ml.so.1"
ROOT = Path("/")


def this_machine(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> HostResources:
    """Return what this process may use; `root` is the parent of /proc and /sys."""
    gpus = visible(gpu_memories(), environ)
    return HostResources(NAME, cores(root), memory(root), len(gpus), min(gpus, default=0))


@cache
def this_host() -> str:
    """Return an id shared by all processes that can find each other by pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, limited by its cgroup's CPU quota."""
    allowed = len(os.sched_getaffinity(0))
    for group in _groups(root):
        quota = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0] > 0:
            allowed = min(allowed, math.ceil(quota[0] / quota[1]))
    return allowed


def memory(root: Path = ROOT) -> int:
    """Return the machine's memory in bytes, limited by this process's cgroups."""
    limits = (
        number
        for group in _groups(root)
        for name in ("memory.max", "memory.limit_in_bytes")
        for number in _numbers(group / name)
    )
    return min([int(psutil.virtual_memory().total), *limits])


def gpu_memories() -> list[int]:
    """Return the memory of each NVIDIA GPU in bytes, from the driver; empty without a driver."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [_gpu_memory(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def visible(memories: list[int], environ: Mapping[str, str]) -> list[int]:
    """Filter by CUDA_VISIBLE_DEVICES; GPUs named by id count as the smallest."""
    if VISIBLE not in environ:
        return memories
    found = []
    for name in filter(None, (one.strip() for one in environ[VISIBLE].split(","))):
        known = name.isdecimal() and int(name) < len(memories)
        if known:
            found.append(memories[int(name)])
        elif not name.isdecimal() and memories:
            found.append(min(memories))
        else:  # CUDA itself stops at the first missing device
            break
    return found


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _gpu_memory(nvml: ctypes.CDLL, index: int) -> int:
    device, about = ctypes.c_void_p(), _Memory()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(about))
    return int(about.total)


def _groups(root: Path) -> list[Path]:
    """Return the cgroups of this process and their ancestors, of both cgroup versions."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in controllers.split(","):
                top = root / "sys/fs/cgroup" / name
                own = top / path.lstrip("/")
                within = [own, *own.parents]
                found += within[: within.index(top) + 1] if top in within else [top]
    return found


def _numbers(file: Path) -> list[int]:
    """Return the integers in a file, empty if it has none."""
    with suppress(OSError):
        parts = file.read_text().split()
        return [int(part) for part in parts if part.isdecimal()] if parts[0] != "max" else []
    return []
