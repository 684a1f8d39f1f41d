"""Normalization of rewards and advantages over masked batches and groups, without gradient.

Axes: B sequences or rollouts, S anything behind them (tokens, or nothing).

Statistics are taken in float64 over the whole tensor that is passed, so pass the whole batch:
nothing is reduced over ranks. Values outside of the mask, also NaN, are never read.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_mesh.losses.reductions import Number, at_least_float32

Level = Literal["batch", "group"] | None


def masked_whiten(
    values: Float[Tensor, "*S"], mask: Bool[Tensor, "*S"], *, shift_mean: bool = True
) -> Float[Tensor, "*S"]:
    """Values less their masked mean, over their masked standard deviation, detached.

        n    = number of masked values + 1e-8        var = unbiased variance
        mean = sum / n                               (x - mean) / sqrt(var + 1e-8)

    Without `shift_mean` the mean is added again afterwards. Source: verl
    `torch_functional.masked_whiten`, down to the 1e-8 in the count: it is lost in float32, where
    equal values get 0, and leaves them up to 1e-4 |x| / n in float64. Differs: 0 under no mask
    (verl's callers multiply by the mask), and fewer than two masked values give 0 (or the mean),
    where verl raises.
    """
    x = torch.where(mask, values.detach().double(), 0.0)
    dtype = at_least_float32(values).dtype
    count = mask.sum(dtype=dtype)
    n = (count + 1e-8).double()
    mean = x.sum() / n
    centred = torch.where(mask & (count > 1), x - mean, 0.0)
    variance = (centred**2).sum() / n * (count / (count - 1).clamp(min=1))
    whitened = centred * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = torch.where(mask, whitened + mean, 0.0)
    return whitened.to(dtype)


def masked_normalization(
    values: Float[Tensor, "*S"],
    mask: Bool[Tensor, "*S"] | None = None,
    dim: int | tuple[int, ...] | None = None,
    *,
    unbiased: bool = False,
    eps: Number = 1e-5,
) -> Float[Tensor, "*S"]:
    """Values less their masked mean, over their masked standard deviation plus eps, detached.

        (x - mean) / (std + eps)        std over n, or over n - 1 if `unbiased`

    Statistics over `dim`, all axes by default. **Entries under no mask are not 0**: they count as a
    value of 0 and become -mean / (std + eps), as in AReaL; mask what is computed from them. Where
    nothing is masked in, all is 0 (AReaL: NaN); a single value has an unbiased std of 0 here.
    Source: AReaL `functional.masked_normalization`, which returns float32 for float64 too.
    """
    present = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    axes = tuple(range(values.dim())) if dim is None else dim
    x = torch.where(present, values.detach().double(), 0.0)
    if axes == ():  # a scalar, which torch would reduce over nothing
        return torch.zeros_like(x, dtype=at_least_float32(values).dtype)
    count = present.sum(axes, keepdim=True)
    mean = x.sum(axes, keepdim=True) / count.clamp(min=1)
    squares = torch.where(present, x - mean, 0.0) ** 2
    std = (squares.sum(axes, keepdim=True) / (count - int(unbiased)).clamp(min=1)).sqrt()
    normalized = torch.where(count > 0, (x - mean) / (std + eps), 0.0)
    return normalized.to(at_least_float32(values).dtype)


def grouped_normalization(
    values: Float[Tensor, "B *S"],
    mask: Bool[Tensor, "B *S"] | None = None,
    *,
    group_size: int = 1,
    mean_level: Level = "batch",
    std_level: Level = "batch",
    mean_leave1out: bool = False,
    std_unbiased: bool = True,
    eps: Number = 1e-5,
) -> Float[Tensor, "B *S"]:
    """Values less a mean, over a standard deviation plus eps, each of its own level; detached.

        (x - mean) / (std + eps)        x - mean if `std_level` is None

    A level is "batch", the whole tensor; "group", `group_size` neighbouring rows with all their
    values; or None, a mean of 0 or no division. `mean_leave1out` leaves each value out
    of its own mean, which for a single value, and for groups of one row, is then 0. The std is
    taken around that mean, over n - 1 or, if not `std_unbiased`, n; it is 1 where that is 0 or
    less, and for groups of one row if unbiased. Entries under no mask are 0.

    Source: AReaL `utils.data.Normalization` with the names of its `NormConfig`. Differs: a mask
    that selects nothing gives 0, where AReaL returns the values unchanged; a batch that is no
    multiple of group_size is an error, where AReaL divides the rest by eps; float64 stays float64.
    """
    present = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    if "group" in (mean_level, std_level):
        _check_groups(values.shape[0], group_size)
    if values.numel() == 0:
        return at_least_float32(values.detach())
    x = torch.where(present, values.detach().double(), 0.0)
    lone = group_size == 1
    mean = torch.zeros_like(x)
    if mean_level is not None and not (mean_level == "group" and lone and mean_leave1out):
        rows, selected = _rows(x, mean_level, group_size), _rows(present, mean_level, group_size)
        mean = _means(rows, selected, mean_leave1out).reshape(x.shape)
    centred = torch.where(present, x - mean, 0.0)
    if std_level is not None:
        rows = _rows(centred, std_level, group_size)
        std = _stds(rows, _rows(present, std_level, group_size), std_unbiased)
        if std_level == "group" and lone and std_unbiased:
            std = torch.ones_like(std)
        centred = (rows / (std + eps)).reshape(x.shape)
    return centred.to(at_least_float32(values).dtype)


def _rows(values: Tensor, level: Level, group_size: int) -> Tensor:
    """Reshape to one row per group, or a single one for the batch."""
    groups = values.shape[0] // group_size if level == "group" else 1
    return values.reshape(groups, -1)


def _means(x: Tensor, present: Tensor, leave_one_out: bool) -> Tensor:
    """Mean of each row for each of its values, with or without that value."""
    count = present.sum(-1, keepdim=True)
    total = x.sum(-1, keepdim=True)
    if leave_one_out:
        return torch.where(count > 1, (total - x) / (count - 1).clamp(min=1), 0.0)
    return (total / count.clamp(min=1)).expand_as(x)


def _stds(centred: Tensor, present: Tensor, unbiased: bool) -> Tensor:
    """Root mean square of each row; 1 for a row with too few values."""
    freedom = present.sum(-1, keepdim=True) - int(unbiased)
    std = ((centred**2).sum(-1, keepdim=True) / freedom.clamp(min=1)).sqrt()
    return torch.where(freedom > 0, std, 1.0)


def _check_groups(rows: int, group_size: int) -> None:
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"group_size is {group_size} but has to be >= 1 and divide the {rows} rows: pass whole"
            " groups, and mask what is missing from them"
        )
