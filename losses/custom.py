"""User-defined loss functions, called once per sequence, and advantage functions, once a batch.

The interface is PRIME-RL's: a function `(inputs: LossInputs, **kwargs)` that returns an object with
`loss`, a scalar SUM over the sequence's tokens, and `metrics`. Functions written for PRIME-RL run
unchanged, also with its own `LossOutputs`, and also if PRIME-RL is not installed.

Advantages have PRIME-RL's interface of 2026-05 (revision eaf95997f; its later revisions have none):
a function `(inputs: AdvantageInputs, **kwargs)` that returns an object with `advantages`. Rollouts
are passed through without inspection. Half precision becomes float32.

Axes: T tokens of one sequence, S of them sampled; P prompts, G rollouts of one prompt.
`custom_function` loads and calls functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from composer_mesh.losses.custom_function import (
    NEEDS,
    AdvantageInputs,
    AdvantageOutputs,
    CustomFunctionError,
    Function,
    LossInputs,
    LossOutputs,
    attribute,
    call_function,
    check_signature,
    load_function,
    loss_needs,
    place_of,
    returned_by,
)
from composer_mesh.losses.reductions import Number, at_least_float32, normalized_sum

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "CustomFunctionError",
    "LossInputs",
    "LossOutputs",
    "MetricSum",
    "check_needs",
    "check_signature",
    "custom_advantages",
    "custom_policy_loss",
    "load_function",
    "loss_needs",
    "try_loss",
]


EXAMPLE_SIZE = 16
EXAMPLE_MASKS = ([False, True, True, True, False, True, True, False, False], [False, True, True])
"""Masks of the sequences on which a loss is tried: tokens of two turns, and of one."""


@dataclass(frozen=True)
class MetricSum:
    """A user's metric as sum and count, so that microbatches and ranks can be added."""

    total: float
    count: int

    def __add__(self, other: "MetricSum") -> "MetricSum":
        return MetricSum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """Mean over all reported values; 0 without any."""
        return self.total / max(self.count, 1)


def custom_policy_loss(
    function: Function,
    name: str,
    kwargs: Mapping[str, Any],
    sequences: Sequence[LossInputs],
    *,
    normalizer: Number,
    ids: Sequence[str] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, MetricSum]]:
    """Sum the function's losses over the sequences, over the normalizer; with its metrics.

        loss = sum over sequences of function(inputs, **kwargs).loss / normalizer

    `name` is the import path in errors, `ids` are trace ids that errors name next to the index of
    the sequence. `normalizer` is PRIME-RL's loss_scale, the trainable tokens of the whole step: a
    function returns a sum, never a mean. A metric is averaged over the sequences that reported it,
    a 1-D one over all their elements (`MetricSum.mean`).

    A sequence with an empty mask is not passed to the function and counts 0, with a valid graph.
    Non-finite values outside of the mask are passed as 0, other values there unchanged. Only
    `trainer_logprobs`, `entropies`, `logits` and `hidden_states` get a gradient. Half precision is
    passed, and summed, as float32.

    Raises `CustomFunctionError`: before anything runs if the signature does not fit; if the
    function raises (chained); if its loss is no finite floating scalar attached to the graph; if a
    metric is no finite number. Without sequences the loss is a 0 that can be differentiated.

    Source: prime-rl `trainer/rl/loss.py::compute_loss`, which checks nothing, calls the function
    for empty masks too, and leaves metrics unreduced.
    """
    check_signature(function, name, kwargs)
    if ids is not None and len(ids) != len(sequences):
        raise ValueError(f"there are {len(ids)} ids for {len(sequences)} sequences: pass one each")
    losses, metrics = list[Tensor](), dict[str, MetricSum]()
    for index, sequence in enumerate(sequences):
        place = place_of("sequence", index, ids[index] if ids else None)
        inputs = _shown(name, place, sequence)
        if not inputs.loss_mask.any():
            losses.append(torch.where(inputs.loss_mask, inputs.trainer_logprobs, 0.0).sum())
            continue
        output = call_function(function, name, place, inputs, kwargs)
        with returned_by(function):
            losses.append(_loss(name, place, output, inputs))
            for key, found in _metrics(name, place, output).items():
                metrics[key] = metrics[key] + found if key in metrics else found
    total = torch.stack(losses) if losses else torch.zeros(1, requires_grad=True)
    return normalized_sum(total, normalizer), metrics


def _shown(name: str, place: str, sequence: LossInputs) -> LossInputs:
    """Return the sequence as passed to the function, its shapes and types checked."""
    mask = sequence.loss_mask
    if mask.dtype != torch.bool:
        raise CustomFunctionError(
            name, place, f"loss_mask is {mask.dtype} but must be bool: compare it with 0"
        )

    def shown(field_name: str) -> Tensor | None:
        values: Tensor | None = getattr(sequence, field_name)
        if values is None:
            return None
        if values.shape != mask.shape or not values.is_floating_point():
            raise CustomFunctionError(
                name,
                place,
                f"{field_name} is {values.dtype} of shape {tuple(values.shape)} but must be"
                f" floating, one number for each of the {tuple(mask.shape)} masks",
            )
        values = values if field_name == "trainer_logprobs" else values.detach()
        values = at_least_float32(values)
        return torch.where(mask | values.isfinite(), values, 0.0)

    fields = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
    found = {key: shown(key) for key in (*fields, "loss_weights")}
    return replace(sequence, **found, **_requested(name, place, sequence))


def _requested(name: str, place: str, sequence: LossInputs) -> dict[str, Tensor | None]:
    """Return the fields with a row for each sampled token, their shapes and types checked."""
    sampled, found = int(sequence.loss_mask.sum()), dict[str, Tensor | None]()
    for key in NEEDS:
        values: Tensor | None = getattr(sequence, key)
        dims = 1 if key == "entropies" else 2
        if values is not None and (
            values.dim() != dims or len(values) != sampled or not values.is_floating_point()
        ):
            raise CustomFunctionError(
                name,
                place,
                f"{key} is {values.dtype} of shape {tuple(values.shape)} but must be floating,"
                f" {'one number' if dims == 1 else 'one row'} for each of {sampled} sampled tokens",
            )
        found[key] = None if values is None else at_least_float32(values)
    return found


def check_needs(function: Function, name: str, needs: Sequence[str]) -> None:
    """Raise `CustomFunctionError` where a function declares a field that `needs` does not name."""
    declared = getattr(function, "needs", ())
    if isinstance(declared, str) or not all(isinstance(one, str) for one in declared):
        problem = f"its needs are {declared!r} but must be a tuple of names"
        raise CustomFunctionError(name, "", f"{problem}: write ({NEEDS[0]!r},)")
    if unknown := [one for one in declared if one not in NEEDS]:
        problem = f"it needs {unknown[0]!r} but there are {', '.join(NEEDS)}"
        raise CustomFunctionError(name, "", f"{problem}: correct it")
    if missing := [one for one in declared if one not in needs]:
        wanted = ", ".join(f'"{one}"' for one in NEEDS if one in {*declared, *needs})
        raise CustomFunctionError(
            name,
            "",
            f"it needs {', '.join(missing)} but loss.needs is {list(needs)}, by which memory is "
            f"planned: set loss.needs to [{wanted}]",
        )


def _loss(name: str, place: str, output: object, inputs: LossInputs) -> Float[Tensor, ""]:
    loss = attribute(name, place, output, "loss")
    sources = (inputs.trainer_logprobs, *(getattr(inputs, key) for key in NEEDS))
    attached = any(one is not None and one.requires_grad for one in sources)
    if not isinstance(loss, Tensor):
        problem = f"its loss is a {type(loss).__name__} but must be a scalar tensor"
    elif loss.shape != ():
        problem = f"its loss has shape {tuple(loss.shape)} but must be a scalar: return its sum"
    elif not loss.is_floating_point():
        problem = f"its loss is {loss.dtype} but must be floating: compute it from the log-probs"
    elif not loss.isfinite():
        problem = f"its loss is {loss.item()} but must be finite: mask before exp and log"
    elif attached and not loss.requires_grad:
        problem = (
            "its loss has no graph, so it would train nothing: compute it from"
            " inputs.trainer_logprobs without detach, item or no_grad"
        )
    else:
        return at_least_float32(loss)
    raise CustomFunctionError(name, place, problem)


def _metrics(name: str, place: str, output: object) -> dict[str, MetricSum]:
    metrics = attribute(name, place, output, "metrics", {})
    if not isinstance(metrics, Mapping):
        raise CustomFunctionError(
            name, place, f"its metrics are a {type(metrics).__name__} but must be a dict"
        )
    return {str(key): _metric(name, place, key, value) for key, value in metrics.items()}


def _metric(name: str, place: str, key: str, value: object) -> MetricSum:
    """Check one metric of one sequence."""
    if not isinstance(value, (Tensor, Real)) or (isinstance(value, Tensor) and value.dim() > 1):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise CustomFunctionError(
            name,
            place,
            f"its metric {key!r} is a {type(value).__name__}{shape} but must be a number, a"
            " scalar tensor or a 1-D tensor",
        )
    values = torch.as_tensor(value).detach().double().reshape(-1)
    total = values.sum().item()
    if not math.isfinite(total):
        raise CustomFunctionError(
            name,
            place,
            f"its metric {key!r} is {total} but must be finite: guard a mean over nothing",
        )
    return MetricSum(total, values.numel())


def try_loss(
    function: Function,
    name: str,
    kwargs: Mapping[str, Any],
    *,
    needs: Sequence[str] = (),
    reference: bool = False,
    vocabulary: int = EXAMPLE_SIZE,
    hidden: int = EXAMPLE_SIZE,
) -> None:
    """Call a loss on two short sequences as a step does, and compute its gradient.

    One has a positive advantage, one a negative. `needs` and `reference` say which fields are
    there, `vocabulary` is V and `hidden` H. Raises `CustomFunctionError`, also for a gradient that
    is not finite.
    """
    random = torch.Generator().manual_seed(0)
    sequences, leaves = list[LossInputs](), list[Tensor]()
    for mask, advantage in zip(EXAMPLE_MASKS, (1.0, -1.0), strict=True):
        sampled = sum(mask)
        width = vocabulary if "logits" in needs else EXAMPLE_SIZE
        logits = torch.randn(sampled, width, generator=random).requires_grad_()
        states = torch.randn(sampled, hidden, generator=random).requires_grad_()
        scores, selected = logits.log_softmax(-1), torch.tensor(mask)
        logprobs = torch.zeros(len(mask)).masked_scatter(selected, scores[:, 0])
        nearly = logprobs.detach() - 0.01 * selected
        fields = {
            "entropies": -(scores.exp() * scores).sum(-1),
            "logits": logits,
            "hidden_states": states,
        }
        sequences.append(
            LossInputs(
                trainer_logprobs=logprobs,
                inference_logprobs=nearly,
                ref_logprobs=nearly.clone() if reference else None,
                advantages=torch.full_like(nearly, advantage),
                loss_mask=selected,
                **{key: fields[key] for key in needs},
            )
        )
        leaves += [logits, states]
    ids = [f"an example of T = {len(one)}, S = {sum(one)}" for one in EXAMPLE_MASKS]
    loss, _ = custom_policy_loss(function, name, kwargs, sequences, normalizer=1, ids=ids)
    call_function(lambda _: loss.backward(), name, "the backward of its loss", None, {})
    if not all(one.grad.isfinite().all() for one in leaves if one.grad is not None):
        problem = (
            "its loss is finite, but the gradient is not: mask before exp, log, sqrt and division"
        )
        with returned_by(function):
            raise CustomFunctionError(name, ids[0], problem)


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
        with returned_by(function):
            advantages = _checked(name, place, output, (len(rows), size))
            _check_finite(name, advantages, rows, ids)
        found |= zip(rows, advantages.unbind(), strict=True)
    return [found[row] for row in range(len(groups))]


def _checked(name: str, place: str, output: object, shape: tuple[int, int]) -> Tensor:
    advantages = attribute(name, place, output, "advantages")
    if not isinstance(advantages, Tensor):
        problem = f"its advantages are a {type(advantages).__name__} but must be a tensor"
    elif advantages.shape != shape:
        problem = (
            f"its advantages have shape {tuple(advantages.shape)} but the rewards {shape}:"
            " return one number for each rollout"
        )
    elif not advantages.is_floating_point():
        problem = f"its advantages are {advantages.dtype} but must be floating: use .float()"
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
                f"its advantage is {found[column].item()} but must be finite: mind a standard"
                " deviation of 0 or of a group of one",
            )


def _place(rows: list[int], ids: Ids) -> str:
    """Describe the groups of one call by the first of them and its first trace."""
    first = place_of("prompt", rows[0], ids[rows[0]][0] if ids else None)
    return first if len(rows) == 1 else f"{first} to prompt {rows[-1]}"
