"""Host memory that a GPU copies to and from at full speed; nothing calls this without a GPU."""

import torch
from torch import Tensor


def pin(memory: Tensor) -> None:
    """Lock the pages of a run of bytes for the GPU's copy engine, until `unpin`."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(memory: Tensor) -> None:
    """Let the pages go; due before the memory itself goes."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
