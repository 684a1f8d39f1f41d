"""Muon of matrices whose rows are sharded over ranks: each is orthogonalized whole, by its owner.

    momentum: each rank, its rows -> all-to-all: rows of R matrices to R owners
    -> each owner orthogonalizes its matrix -> all-to-all: rows back -> update: each rank, its rows

Matrices are taken in rounds of R, the largest first, so that the owners of a round have about the
same work. The orthogonalization is torch's, which computes in bfloat16: in that the rows travel to
the owners, and an update is that of whole matrices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_mesh.actors.models.sharding import local

ADJUST = "match_rms_adamw"
"""torch's name of the scale by which an update is as large as AdamW's."""


class ShardedMuon(torch.optim.Optimizer):
    """torch's Muon with Nesterov momentum, of DTensors sharded by rows over the ranks of one mesh.

    `step` is collective.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices; every rank has gradients of the same ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices = [one for one in group["params"] if one.grad is not None]
            matrices.sort(key=lambda one: -one.numel())
            for first in range(0, len(matrices), size := _ranks(matrices)):
                self._update(matrices[first : first + size], group)
        return loss

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the matrices of one round, the first of which belongs to rank 0."""
        pulls = [self._pull(one, group["momentum"]) for one in matrices]
        updates = _orthogonalized(matrices, pulls)
        for matrix, update in zip(matrices, updates, strict=True):
            rows = local(matrix)
            rows.mul_(1 - group["lr"] * group["weight_decay"])
            rows.add_(update, alpha=group["lr"])

    def _pull(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Return this rank's rows of the momentum, one step ahead, in bfloat16."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        buffer, gradient = local(state["momentum_buffer"]), local(matrix.grad)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()


def _ranks(matrices: Sequence[Any]) -> int:
    return matrices[0].device_mesh.size() if matrices else 1


def _orthogonalized(matrices: Sequence[Any], pulls: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of the updates of matrices, for a rate of 1, from its `pulls`."""
    mesh = matrices[0].device_mesh
    rank, group = mesh.get_local_rank(), mesh.get_group()
    counts = [_row_counts(one) for one in matrices]
    sent = [pull.numel() for pull in pulls] + [0] * (mesh.size() - len(matrices))
    owned = rank < len(matrices)
    width = matrices[rank].shape[1] if owned else 0
    received = [width * one for one in counts[rank]] if owned else [0] * mesh.size()
    whole = _exchanged(torch.cat([one.flatten() for one in pulls]), sent, received, group)
    update = whole.float()
    if owned:
        update = _update_of(update.view(matrices[rank].shape)).flatten()
    back = _exchanged(update, received, sent, group)
    parts = back.split(sent)[: len(pulls)]
    return [part.view_as(pull) for part, pull in zip(parts, pulls, strict=True)]


def _update_of(pull: Tensor) -> Tensor:
    """Return what torch's Muon adds to a matrix at a rate of 1, given its momentum."""
    matrix = nn.Parameter(torch.zeros_like(pull))
    matrix.grad = pull
    torch.optim.Muon(
        [matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=ADJUST
    ).step()
    return matrix.detach()


def _row_counts(matrix: Any) -> list[int]:
    """Return the rows of each rank: as many as fit, for the first ones."""
    ranks, rows = matrix.device_mesh.size(), matrix.shape[0]
    most = -(-rows // ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def _exchanged(values: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send runs of values to the ranks; return what arrives."""
    arrived = values.new_empty(sum(received))
    dist.all_to_all_single(arrived, values, [*received], [*sent], group=group)
    return arrived
