"""Pins host memory for full-speed copies to and from a GPU; only called if there is one."""

import torch
from torch import Tensor


def pin(memory: Tensor) -> None:
    """Page-lock a buffer for the GPU's copy engine, until `unpin`."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Unlock the pages; must be called before the memory is freed."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
