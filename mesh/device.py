"""The device that this process computes on: the GPU assigned by its placement, or the CPU.

    model = load_model(folder).to(own_device())

`configs.placement` configures the assignment; the process gets it by environment variables
(`mesh.process_resources`), which also limit its threads: they are set before torch is imported, so
that `torch.set_num_threads` is not needed. A GPU is never used just because it is available.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from composer_mesh.mesh.process_resources import own_gpu_share, own_gpus

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables in which torch reads how to allocate GPU memory; the second is the older name."""
EXPANDABLE = "expandable_segments:True"
"""Freed memory serves tensors of other sizes: a trainer holds up to 15 % less (`docs/gpu.md`)."""


class NoGpuHere(Exception):
    """A process was assigned GPUs but torch finds none: the GPUs' numbers on the host."""

    def __str__(self) -> str:
        return (
            f"the placement gives this process GPU {', '.join(map(str, self.args[0]))} of its "
            "host, but torch finds no CUDA device: install a CUDA build of torch, correct "
            "placement.hosts, or set gpus to 0"
        )


def own_device() -> torch.device:
    """Return CUDA device 0 where this process was assigned GPUs, else the CPU.

    The process sees only its assigned GPUs. If it has a share of a GPU, torch is limited to that
    share of its memory. Its memory grows in expandable segments, unless the environment says how
    torch allocates. Outside of a run it is the CPU. Raises `NoGpuHere` if an assigned GPU cannot be
    used.
    """
    gpus = own_gpus()
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoGpuHere(gpus)
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = EXPANDABLE
    device = torch.device("cuda", 0)
    if (share := own_gpu_share()) < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device


def pin(memory: Tensor) -> None:
    """Page-lock a buffer for the GPU's copy engine, until `unpin`."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Unlock the pages; must be called before the memory is freed."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
