"""How much memory one tensor took at most: sizes as operations return them, nothing estimated."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return found
