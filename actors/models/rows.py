"""Whole tensors and the rows of them that a rank has: cut to read.

A tensor that is not sharded is complete.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`, sharded over ranks."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return found


def distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without later names of the same tensor."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def rows_of(whole: Tensor, like: Any) -> Tensor:
    """Return a copy of this rank's rows of a complete tensor, sharded like another tensor."""
    if not is_dtensor(like):
        return whole.to(like.device, like.dtype, copy=True)
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.device, like.dtype)
    cut = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return cut.clone()


def from_rows(rows: Tensor, like: Any, shape: Sequence[int]) -> Tensor:
    """Return the tensor of a shape of which this rank has these rows, sharded like another tensor.

    It shares the rows' memory, which may be on another device than the other tensor's.
    """
    if not is_dtensor(like):
        return rows
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = torch.empty(*shape, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), rows.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    found: Tensor = DTensor(rows, spec, requires_grad=False)
    return found


@torch.no_grad()
def broadcast_into(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Fill tensors, in place, with the complete ones of rank 0. Collective."""
    done: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if source:
            whole.copy_(source[name])
        dist.broadcast(whole, 0)
        local(tensor).copy_(local(rows_of(whole, tensor)))
