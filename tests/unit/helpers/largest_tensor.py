"""How much memory one tensor took at most: sizes as operations return them, nothing estimated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, of one dtype or of all."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.numbers, self._dtype = 0, dtype

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        sizes = [one.numel() for one in tensors if self._dtype in (None, one.dtype)]
        self.numbers = max([self.numbers, *sizes])
        return found
