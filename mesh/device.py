"""The device that this process computes on: the GPU that its placement gave it, or the CPU.

    model = load_model(folder).to(own_device())

Who is given what is decided by `configs.placement`; the process hears of it by environment
variables (`mesh.share`), which also bound its threads: they are set before torch is imported, so
nobody calls `torch.set_num_threads`. No GPU is ever chosen because one happens to be there.
"""

from __future__ import annotations

import torch

from composer_mesh.mesh.process_resources import own_gpu_share, own_gpus


class NoGpuHere(Exception):
    """A process was given GPUs but torch finds none in it: the GPUs by the host's count."""

    def __init__(self, gpus: list[int]) -> None:
        super().__init__(gpus)

    def __str__(self) -> str:
        return (
            f"the placement gives this process GPU {', '.join(map(str, self.args[0]))} of its "
            "host, but torch finds no CUDA device: install a CUDA build of torch, correct "
            "placement.hosts, or set gpus to 0"
        )


def own_device() -> torch.device:
    """CUDA device 0 where this process was given GPUs, which are all that it sees; else the CPU.

    Where the process has only a share of its GPU, torch is bounded to that share of its memory.
    Outside of a run it is the CPU. Raises `NoGpuHere` where a given GPU cannot be used.
    """
    gpus = own_gpus()
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoGpuHere(gpus)
    device = torch.device("cuda", 0)
    if (share := own_gpu_share()) < 1:
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device
