"""torchao's AdamW with both moments in 8 bits, stored as codes and scales.

    exp_avg.codes [rows, ...] uint8    exp_avg.scale [rows, blocks of a row] float32

Blocks of values that share a scale never cross a row of their weight. So those of a rank are those
of the complete weight, and any number of ranks restores the same codes and scales. Storing the
values in float32 instead would lose the scale of a block whose largest value is negative, because
no code is -1. Importing this module takes a second, and torchao, which is an optional extra.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import composer_mesh.actors.models.quiet_torchao  # noqa: F401
from composer_mesh.actors.models.sharding import from_rows, local
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.planning.model_refusals import LowbitMissing
from composer_mesh.planning.optimizer_memory import UPDATED_VALUES, block_size

MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Names of the state that has 8 bits, and whether it has a sign."""


try:
    import torchao.optim
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit
except ModuleNotFoundError as error:
    raise LowbitMissing() from error


class AdamW8bit(torchao.optim.AdamW8bit):
    """AdamW of weights in float32, of which the large ones have their state in 8 bits."""

    def __init__(self, weights: Iterable[nn.Parameter], trainer: TrainerConfig) -> None:
        super().__init__(
            weights,
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            weight_decay=trainer.weight_decay,
        )
        self._compiled = trainer.compile

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have a gradient; compiled only with `trainer.compile`."""
        updated = [
            (group, weight)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        for _, weight in updated:
            if not self.state[weight]:
                self.begin(weight, weight.device)
        if self._compiled:
            return super().step(closure)
        result = None if closure is None else closure()
        with torch.no_grad():
            for group, weight in updated:
                self._update(group, weight)
        return result

    def _update(self, group: dict[str, Any], weight: nn.Parameter) -> None:
        """Update a weight by torchao's function, some values after the others."""
        state = self.state[weight]
        state["step"] += 1
        gradient = local(weight.grad).reshape(-1)
        written = [weight.detach(), *(state[key] for key, _ in MOMENTS)]
        values, mean, square = (local(one).view(-1) for one in written)
        for start in range(0, len(values), UPDATED_VALUES):
            part = slice(start, min(start + UPDATED_VALUES, len(values)))
            single_param_adam(
                *(values[part], gradient[part], state["step"], mean[part], square[part], None),
                *(group["lr"], *group["betas"], group["weight_decay"], group["eps"]),
                IS_ADAMW=True,
                BF16_STOCHASTIC_ROUND=False,
            )

    def begin(self, weight: nn.Parameter, device: torch.device) -> None:
        """Give a weight the state from before its first update, on a device."""
        zeros = {key: _zero_moment(weight, signed, device) for key, signed in MOMENTS}
        self.state[weight] = {"step": torch.tensor(0.0), **zeros}

    def stored(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return a weight's state as plain tensors, of which a rank has its rows; shares memory."""
        state, block = self.state.get(weight, {}), block_size(weight.shape)
        if not state or not block:
            return dict(state)
        found = {"step": state["step"]}
        for key, _ in MOMENTS:
            found |= {f"{key}.{part}": one for part, one in _parts(weight, state[key], block)}
        return found


def _zero_moment(weight: nn.Parameter, signed: bool, device: torch.device) -> Tensor:
    rows, block = local(weight.detach()), block_size(weight.shape)
    if block and rows.numel():  # a rank may have no rows
        zeros = OptimState8bit.zeros(rows.shape, signed, block, device)
    else:
        zeros = torch.zeros_like(rows, device=device)
    return from_rows(zeros, weight, weight.shape)


def _parts(weight: nn.Parameter, moment: Tensor, block: int) -> Iterator[tuple[str, Tensor]]:
    """Yield codes and scales of a moment, sharded like its weight."""
    rows: Any = local(moment)
    blocks = math.prod(weight.shape[1:]) // block
    if rows.numel():
        codes, scale = rows.codes, rows.scale.view(len(rows), blocks)
    else:
        codes, scale = rows.to(torch.uint8), rows.new_zeros(0, blocks)
    yield "codes", from_rows(codes, weight, weight.shape)
    yield "scale", from_rows(scale, weight, (len(weight), blocks))
