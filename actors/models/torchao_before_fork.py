"""Importing this imports torchao, where transformers would, without initializing CUDA.

For fork servers: transformers imports torchao, which asks torch what a GPU can do, and a process
that has initialized CUDA cannot fork one that uses it. Here torchao is informed that there is
none, and forks lack its kernels for MX formats, which nothing here uses.
"""

from __future__ import annotations

import torch
from torch.utils import _triton
from transformers.utils import is_torchao_available

import composer_mesh.actors.models.quiet_torchao  # noqa: F401

if is_torchao_available():
    _is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        import torchao.prototype.safetensors.safetensors_support  # noqa: F401 as transformers does
    finally:
        torch.cuda.is_available = _is_available
        _triton.has_triton.cache_clear()
