"""What a process is given of its host: threads, cores and GPUs, told by environment variables.

The controller writes them (`share_env`), the process takes them before anything counts cores or
GPUs (`take_share`, called by `child`). Who is given what is the placement's decision; nothing here
imports torch or Monarch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")

CORES = "COMPOSER_MESH_CORES"
GPUS = "COMPOSER_MESH_GPUS"
GPU_SHARE = "COMPOSER_MESH_GPU_SHARE"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ADDRESS = "COMPOSER_MESH_ADDRESS"
"""Where others reach the host of this process; not set where the run has no other host."""
FOLDER = "COMPOSER_MESH_FOLDER"
"""Where the user stands, against which paths are meant; not set where that is inherited."""


class ShareMissing(Exception):
    """A process was given a core or a GPU that its host does not have: kind, number, how many."""

    def __init__(self, kind: str, number: int, count: int) -> None:
        super().__init__(kind, number, count)

    def __str__(self) -> str:
        kind, number, count = self.args
        return (
            f"{kind} {number} was given to this process, but its host lets it use {count}, counted "
            "from 0: correct placement.hosts, or give the run more of the host"
        )


def share_env(
    threads: int,
    cores: Sequence[int] = (),
    gpus: Sequence[int] = (),
    gpu_share: float = 1.0,
) -> dict[str, str]:
    """The variables that tell a process its share; no cores means any, no GPUs means the CPU.

    Cores and GPUs are counted from 0 among those that the host lets the run use. `gpu_share` is
    what part of the memory of its GPU belongs to it. Torch counts threads per thread, so only the
    environment bounds all that an actor starts.
    """
    env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env |= {CORES: _listed(cores), GPUS: _listed(gpus)}
    return env | ({GPU_SHARE: f"{gpu_share:g}"} if gpus and gpu_share < 1 else {})


def take_share(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bind this process to its cores and hide all GPUs but its own; raises `ShareMissing`.

    Without the variables of a placement nothing changes.
    """
    if wanted := _numbers(environ.get(CORES, "")):
        allowed = sorted(os.sched_getaffinity(0))
        bind([_pick("core", allowed, number) for number in wanted])
    if GPUS in environ:
        environ[VISIBLE] = ",".join(_own_gpus(environ))


def bind(cores: Sequence[int]) -> None:
    """Let this process run on these cores of the machine: threads that it has, and will have."""
    for thread in psutil.Process().threads():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(thread.id, cores)


def own_gpus(environ: Mapping[str, str] = os.environ) -> list[int]:
    """The GPUs that a placement gave this process, by its host's count; empty on the CPU."""
    return _numbers(environ.get(GPUS, ""))


def own_gpu_share(environ: Mapping[str, str] = os.environ) -> float:
    """What part of the memory of its GPU belongs to this process."""
    return float(environ.get(GPU_SHARE, "1"))


def _own_gpus(environ: Mapping[str, str]) -> list[str]:
    """What the driver calls them: a number, or an id where the host was itself given ids."""
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
