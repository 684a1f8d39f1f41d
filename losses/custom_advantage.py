"""User-defined advantage functions, called once per batch of groups.

The interface is PRIME-RL's of 2026-05 (revision eaf95997f; its later revisions have none): a
function `(inputs: AdvantageInputs, **kwargs)` that returns an object with `advantages`. Functions
written for it run unchanged, also with its own `AdvantageOutputs`.

Axes: P prompts, G rollouts of one prompt. Rollouts are passed through without inspection;
`custom_function` loads and calls functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from composer_mesh.losses.custom_function import (
    CustomFunctionError,
    Function,
    attribute,
    call_function,
    check_signature,
    load_function,
    place_of,
)
from composer_mesh.losses.custom_types import AdvantageInputs, AdvantageOutputs
from composer_mesh.losses.reductions import at_least_float32

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "CustomFunctionError",
    "check_signature",
    "custom_advantages",
    "load_function",
]


Ids = Sequence[Sequence[str]] | None


def custom_advantages(
    function: Function,
    name: str,
    kwargs: Mapping[str, Any],
    groups: Sequence[Sequence[Any]],
    *,
    ids: Ids = None,
) -> list[Float[Tensor, "G"]]:
    """Advantages of each group's rollouts, detached, in the order of the groups.

    `groups[i]` are the rollouts of prompt i that finished. A PRIME-RL function may stack rewards
    into one tensor, so each call has groups of one size: one call with all groups if no rollout
    failed, else one call per size. An empty group is not passed.

    `name` is the import path in errors, `ids` the trace id of each rollout. The advantages must be
    a floating tensor of shape [groups passed, their size] without NaN or infinity, else
    `CustomFunctionError` (also for a signature that does not fit, before anything runs, and for an
    exception of the function, chained). Half precision becomes float32.
    """
    check_signature(function, name, kwargs)
    found = {row: torch.zeros(0) for row, group in enumerate(groups) if not group}
    for size in sorted({len(group) for group in groups} - {0}):
        rows = [row for row, group in enumerate(groups) if len(group) == size]
        inputs = AdvantageInputs([list(groups[row]) for row in rows])
        place = _place(rows, ids)
        output = call_function(function, name, place, inputs, kwargs)
        advantages = _checked(name, place, output, (len(rows), size))
        _check_finite(name, advantages, rows, ids)
        found |= zip(rows, advantages.unbind(), strict=True)
    return [found[row] for row in range(len(groups))]


def _checked(name: str, place: str, output: object, shape: tuple[int, int]) -> Tensor:
    advantages = attribute(name, place, output, "advantages")
    if not isinstance(advantages, Tensor):
        problem = f"its advantages are a {type(advantages).__name__} but have to be a tensor"
    elif advantages.shape != shape:
        problem = (
            f"its advantages have shape {tuple(advantages.shape)} but the rewards {shape}:"
            " return one number for each rollout"
        )
    elif not advantages.is_floating_point():
        problem = f"its advantages are {advantages.dtype} but have to be floating: use .float()"
    else:
        return at_least_float32(advantages.detach())
    raise CustomFunctionError(name, place, problem)


def _check_finite(name: str, advantages: Tensor, rows: list[int], ids: Ids) -> None:
    for found, row in zip(advantages, rows, strict=True):
        for column in (~found.isfinite()).nonzero().flatten().tolist():
            place = place_of("prompt", row) + ", "
            place += place_of("rollout", column, ids[row][column] if ids else None)
            raise CustomFunctionError(
                name,
                place,
                f"its advantage is {found[column].item()} but has to be finite: mind a standard"
                " deviation of 0 or of a group of one",
            )


def _place(rows: list[int], ids: Ids) -> str:
    """Describe the groups of one call by the first of them and its first trace."""
    first = place_of("prompt", rows[0], ids[rows[0]][0] if ids else None)
    return first if len(rows) == 1 else f"{first} to prompt {rows[-1]}"
