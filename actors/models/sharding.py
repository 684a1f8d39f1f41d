"""FSDP2: every rank holds some rows of each weight, and complete layers only during compute.

Weights, gradients and optimizer state are float32 and sharded; forward and backward compute in the
requested dtype. Gradients are summed over ranks, not averaged, after every backward: unreduced
until the last one they would take as much memory as the weights of all ranks.

Only a forward, and the backward that follows it, communicate with other ranks; reading the weights
by `own_weights`, possibly in another thread that copies them during a forward, does not.

Whole tensors and the rows of them that a rank has: cut to read.

A tensor that is not sharded is complete.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from composer_mesh.actors.models.language_model import STATES, decoder_states, text_decoder_of
from composer_mesh.planning.model_refusals import UnknownLayers


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`, sharded over ranks."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


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
    return DTensor(rows, spec, requires_grad=False)


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


OWN = "own_weights"


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the list of a model's decoder layers; raises `UnknownLayers`."""
    count = model.config.get_text_config().num_hidden_layers
    for module in text_decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnknownLayers(type(model).__name__, count)


def shard(
    model: Any, mesh: DeviceMesh, dtype: torch.dtype, apart: Iterable[nn.Parameter] = ()
) -> None:
    """Shard a model's weights over the ranks of a mesh, in place, except those that are `apart`.

    `LanguageModel` computes in `dtype` from then on.
    """
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*decoder_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set(apart))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports sums and averages only
    setattr(model, STATES, MethodType(decoder_states, model))
    register_fsdp_forward_method(model, STATES)


def is_sharded(model: Any) -> bool:
    """Whether `shard` was applied to a model."""
    return hasattr(model, STATES)


def release(model: Any) -> None:
    """Free the gathered weights of a forward that had no backward."""
    if is_sharded(model):
        # torch 2.11 lacks the reset, which also clears the order that forwards leave to a backward.
        getattr(model, "reset_iter_state", model.reshard)()


def keep_head(model: Any, keep: bool) -> None:
    """Say whether the head and all else outside of layers stays gathered after a backward.

    Losses read the head outside of the forward, so that a second backward through one forward finds
    it only if the first one kept it.
    """
    if is_sharded(model):
        model.set_reshard_after_backward(not keep, recurse=False)


def remember_weights(model: Any) -> None:
    """Store references to the weights as they are between steps, for `own_weights`.

    During a forward a sharded model shows gathered weights in their place.
    """
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    setattr(model, OWN, {name: found[name] for name in model.state_dict()})


def stored_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers themselves, as they are between steps."""
    weights: dict[str, Tensor] | None = getattr(model, OWN, None)
    return model.state_dict(keep_vars=True) if weights is None else weights


def own_weights(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, this rank's rows where it is sharded.

    Several names of one tensor map to one object. Moves nothing, and shares memory with the model.
    """
    weights = stored_weights(model)
    detached = {id(tensor): tensor.detach() for tensor in weights.values()}
    return {name: detached[id(tensor)] for name, tensor in weights.items()}
