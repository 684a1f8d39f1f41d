"""Resources of a process on its host: threads, cores and GPUs, passed by environment variables.

The controller sets them (`share_env`); the process applies them before anything counts cores or
GPUs (`take_share`, called by `bootstrap`). The placement decides the assignment. Imports neither
torch nor Monarch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TypeVar

import psutil

from composer_mesh.configs.worded import Worded

T = TypeVar("T")

CORES = "COMPOSER_MESH_CORES"
GPUS = "COMPOSER_MESH_GPUS"
GPU_SHARE = "COMPOSER_MESH_GPU_SHARE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ADDRESS = "COMPOSER_MESH_ADDRESS"
"""Address at which other hosts reach this one; unset if the run has no other host."""
FOLDER = "COMPOSER_MESH_FOLDER"
"""The user's working directory, which relative paths refer to; unset if it is inherited."""


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Return freed memory to the host where the C library is glibc, which keeps it otherwise.

    Tensors of ever other lengths leave gaps between those that live longer.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


class ShareMissing(Worded, Exception):
    """A process was assigned a core or GPU that its host lacks: kind, number, count."""

    message = (
        "{0} {1} was given to this process, but its host lets it use {2}, counted from 0: "
        "correct placement.hosts, or give the run more of the host"
    )


def share_env(
    threads: int,
    cores: Sequence[int] = (),
    gpus: Sequence[int] = (),
    gpu_share: float = 1.0,
) -> dict[str, str]:
    """Return the environment variables of a process; no cores means any, no GPUs means the CPU.

    Cores and GPUs are counted from 0 among those that the host lets the run use. `gpu_share` is the
    fraction of its GPU's memory that it may use. Torch's thread limit is per thread, so only the
    environment limits everything that an actor starts.
    """
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env |= {CORES: _listed(cores), GPUS: _listed(gpus)}
    return env | ({GPU_SHARE: f"{gpu_share:g}"} if gpus and gpu_share < 1 else {})


def take_share(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bind this process to its cores and hide all other GPUs; raises `ShareMissing`.

    Does nothing without the variables of a placement.
    """
    if wanted := _numbers(environ.get(CORES, "")):
        allowed = sorted(os.sched_getaffinity(0))
        bind([_pick("core", allowed, number) for number in wanted])
    if GPUS in environ:
        environ[VISIBLE] = ",".join(_own_gpus(environ))


def bind(cores: Sequence[int]) -> None:
    """Bind this process's current and future threads to these cores of the machine."""
    for thread in psutil.Process().threads():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread.id, cores)


def own_gpus(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the host's numbers of the GPUs assigned to this process; empty on the CPU."""
    return _numbers(environ.get(GPUS, ""))


def own_gpu_share(environ: Mapping[str, str] = os.environ) -> float:
    """Return the fraction of its GPU's memory that this process may use."""
    return float(environ.get(GPU_SHARE, "1"))


def _own_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the driver's names of the GPUs: numbers, or ids if the host was given ids."""
    wanted = own_gpus(environ)
    if VISIBLE not in environ:
        return [str(number) for number in wanted]
    visible = [one.strip() for one in environ[VISIBLE].split(",") if one.strip()]
    return [_pick("GPU", visible, number) for number in wanted]


def _pick(kind: str, found: Sequence[T], number: int) -> T:
    if number >= len(found):
        raise ShareMissing(kind, number, len(found))
    return found[number]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
