"""Importing this imports torchao, where it is installed, without initializing CUDA.

For fork servers: transformers imports torchao, which asks torch what a GPU can do, and a process
that has initialized CUDA cannot fork one that uses it. Here torchao is told that there is none, and
forks lack its kernels for MX formats, which nothing here uses.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch.utils import _triton

import composer_mesh.actors.models.quiet_torchao  # noqa: F401

if find_spec("torchao") is not None:
    _is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        import torchao.prototype.safetensors.safetensors_support  # noqa: F401 as transformers does
    finally:
        torch.cuda.is_available = _is_available
        _triton.has_triton.cache_clear()
