"""Executes clients' operations on their models, without messaging.

Adapters of several models are trained on one frozen base in common forwards; the state of a model
depends only on its own operations and on the shapes in which they were computed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_mesh.actors.models.language_model import decoder_states, logit_softcap
from composer_mesh.actors.served_models.batches import (
    Batch,
    Padded,
    batches,
    microbatches,
    padded,
    padded_inputs,
    target_count,
)
from composer_mesh.actors.served_models.messages import (
    CHANGES,
    Datum,
    ModelNotOpen,
    ModelSpec,
    Shape,
    TrainCall,
    TrainResult,
)
from composer_mesh.actors.served_models.model_state import (
    ModelState,
    UnusableState,
    read_state,
    write_state,
)
from composer_mesh.actors.served_models.results import TOTAL, joined, metrics_of
from composer_mesh.actors.served_models.target_logprobs import target_logprobs
from composer_mesh.actors.served_models.trained_weights import FunctionalModel, Weights
from composer_mesh.losses.client_losses import CLIENT_LOSSES

logger = logging.getLogger(__name__)

FORWARDS = ("forward", "forward_backward")


class ClientTrainer:
    """Holds clients' models and executes their calls; one caller at a time."""

    def __init__(self, base: Any, weights: Weights, most_tokens: int, most_models: int) -> None:
        self.models: dict[str, ModelState] = {}
        self._weights, self._most_tokens, self._most_models = weights, most_tokens, most_models
        self.vocabulary = int(base.config.get_text_config().vocab_size)
        self._softcap, self._device = logit_softcap(base.config), next(base.parameters()).device

    def open(self, name: str, spec: ModelSpec, path: Path | None) -> int:
        """Take a model in, from its file where it has one; return its position."""
        state = ModelState(spec, self._weights.initial(spec).to(self._device))
        if path is not None:
            state.resume(self._fitting(path, state))
        self.models[name] = state
        return state.position

    def close(self, name: str) -> None:
        """Forget a model."""
        self.models.pop(name, None)

    def save(self, name: str, path: Path, weights_only: bool = False) -> int:
        """Write a model's state; return the bytes of the file."""
        return write_state(path, self._held(name).stored(), weights_only)

    def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        """Execute calls, one after another for each model; return their results in order.

        Calls of different models at the same turn may share a forward. A call that cannot be
        executed has an error and changes nothing. Raises `ModelNotOpen` before anything is
        executed.
        """
        self._check_positions(calls)
        results: list[TrainResult | None] = [None] * len(calls)
        for turn in _turns(calls):
            forwards = [calls[number] for number in turn if calls[number].kind in FORWARDS]
            found = {id(one): result for one, result in self._forwards(forwards)}
            for number in turn:
                call = calls[number]
                results[number] = found[id(call)] if id(call) in found else self._other(call)
        return [one for one in results if one is not None]

    def _check_positions(self, calls: Sequence[TrainCall]) -> None:
        expected: dict[str, int] = {}
        for call in calls:
            if call.model not in expected:
                state = self.models.get(call.model)
                held = -1 if state is None else state.position
                if held != call.position:
                    raise ModelNotOpen(call.model, call.position, held)
                expected[call.model] = held

    def _other(self, call: TrainCall) -> TrainResult:
        state = self._held(call.model)
        try:
            if call.kind == "optim_step":
                assert call.adam is not None
                metrics = state.step(call.adam)
            elif call.kind == "load_weights":
                state.restore(self._fitting(Path(call.path), state), call.optimizer)
                metrics = {}
            else:
                size = write_state(Path(call.path), state.stored(), not call.optimizer)
                metrics = {"bytes": float(size)}
        except ValueError as error:
            return TrainResult(error=str(error))
        state.position += call.kind in CHANGES
        return TrainResult(metrics=metrics)

    def _fitting(self, path: Path, state: ModelState) -> Any:
        stored = read_state(path)
        if self._weights.key(stored.spec) != self._weights.key(state.spec):
            raise UnusableState(
                str(path), f"it is of {stored.spec}, and this model is of {state.spec}"
            )
        if stored.tensors["weights"].shape != state.weights.shape:
            raise UnusableState(str(path), "it is of another base model")
        return stored

    def _forwards(self, calls: Sequence[TrainCall]) -> list[tuple[TrainCall, TrainResult]]:
        keyed = [(call, self._key(call)) for call in calls]
        return [
            pair
            for batch in batches(keyed, self._most_tokens, self._most_models)
            for pair in zip(batch.calls, self._forward(batch), strict=True)
        ]

    def _key(self, call: TrainCall) -> Hashable:
        spec = self._held(call.model).spec
        targets = max(target_count(one) for one in call.data)
        alone = call.model if spec.rank == 0 else ""
        return (alone, call.kind, targets, self._weights.key(spec))

    def _forward(self, batch: Batch) -> list[TrainResult]:
        """Run a batch; where it fails unexpectedly, its calls alone, so that none harms another."""
        before = {call.model: self._held(call.model).gradient for call in batch.calls}
        try:
            return self._together(batch)
        except Exception as error:  # supervision boundary: of a client's data, not of the trainer
            for model, gradient in before.items():
                self._held(model).gradient = gradient
            if len(batch.calls) == 1:
                logger.exception("an operation of %s failed", batch.calls[0].model)
                return [TrainResult(error=f"the trainer failed: {type(error).__name__}: {error}")]
        return [
            result
            for call in batch.calls
            for one in batches([(call, None)], self._most_tokens, 1)
            for result in self._forward(one)
        ]

    def _together(self, batch: Batch) -> list[TrainResult]:
        """Run the forward, and the backward, of calls that share one; moves their positions."""
        if len(batch.calls) == 1:
            found = [self._alone(batch.calls[0], batch.shapes[0])]
        else:
            owners = zip(batch.calls, batch.shapes, strict=True)
            found = self._part([_Rows(call, call.data, shape) for call, shape in owners])
        for call, result in zip(batch.calls, found, strict=True):
            self._held(call.model).position += call.kind in CHANGES and not result.error
        return found

    def _alone(self, call: TrainCall, shape: Shape) -> TrainResult:
        """Run a call's microbatches; a failed one takes back those before it."""
        state, found = self._held(call.model), list[TrainResult]()
        before = state.gradient
        parts = microbatches(call, shape, self._most_tokens)
        for part in parts:
            own = shape if len(parts) == 1 else _shape_of(part)
            found += self._part([_Rows(call, part, own)])
            if found[-1].error:
                state.gradient = before
                return found[-1]
        return joined(found, shape)

    def _part(self, owners: Sequence[_Rows]) -> list[TrainResult]:
        """Run one forward of some models' rows; places without a model are of zeros."""
        first, shape = owners[0].call, owners[0].shape
        backward = first.kind == "forward_backward"
        flats: list[Tensor | None] = [None] * shape.models
        data: list[tuple[Datum, ...]] = [()] * shape.models
        for one in owners:
            flats[one.shape.place] = self._held(one.call.model).weights
            data[one.shape.place] = one.data
        rows = padded(data, shape)
        with torch.set_grad_enabled(backward):
            model, leaf = self._weights.enter(self._held(first.model).spec, flats)
            found = self._logprobs(model, rows, shape)
            losses = [one.loss(found, rows) for one in owners]
            if backward:
                torch.stack([total for total, _ in losses]).sum().backward()
        gradients = leaf.grad if backward else None
        logprobs = found.detach().cpu().numpy()
        return [
            self._settled(one, metrics_of(*loss), gradients, logprobs)
            for one, loss in zip(owners, losses, strict=True)
        ]

    def _settled(
        self,
        owner: _Rows,
        metrics: dict[str, float],
        gradients: Tensor | None,
        logprobs: NDArray[np.float32],
    ) -> TrainResult:
        """Add a call's gradient where it is finite; return its result."""
        state, shape, loss = self._held(owner.call.model), owner.shape, metrics[TOTAL]
        if not math.isfinite(loss) or not (
            gradients is None or state.accumulate(gradients[shape.place])
        ):
            return TrainResult(
                error=f"the loss is {loss} or its gradient is not finite: nothing was added; look "
                "for values that are not finite, or too large, in the data"
            )
        return TrainResult(owner.cut(logprobs), metrics, shape)

    def _logprobs(self, model: Any, rows: Padded, shape: Shape) -> Tensor:
        """Return the log-probs [B, T, K] of all targets."""
        ids, targets = rows.ids.to(self._device), rows.targets.to(self._device)
        functional = isinstance(model, FunctionalModel)
        hidden = model.states(ids) if functional else decoder_states(model, input_ids=ids)
        head = model.head if functional else model.get_output_embeddings()
        states = hidden.reshape(shape.models, -1, hidden.shape[-1])
        wanted = targets.reshape(shape.models, -1, targets.shape[-1])
        found = target_logprobs(states, head, wanted, self.vocabulary, self._softcap)
        return found.reshape(targets.shape)

    def _held(self, name: str) -> ModelState:
        return self.models[name]


@dataclass(frozen=True)
class _Rows:
    """Some rows of a call, and where they are in a batch."""

    call: TrainCall
    data: tuple[Datum, ...]
    shape: Shape

    @property
    def first(self) -> int:
        return self.shape.place * self.shape.rows

    def loss(self, found: Tensor, rows: Padded) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss and those of its channels; padded rows and positions add nothing."""
        own = found[self.first : self.first + len(self.data)]
        mask = rows.mask[self.first : self.first + len(self.data)].to(own.device)
        if own.shape[2] == 1:
            own, mask = own[..., 0], mask[..., 0]
        inputs = padded_inputs(self.data, own)
        return CLIENT_LOSSES[self.call.loss].total(own, inputs, self.call.options, mask)

    def cut(self, logprobs: NDArray[np.float32]) -> tuple[NDArray[np.float32], ...]:
        """Return each row's log-probs in the shape of its targets."""
        return tuple(
            logprobs[row, : len(one.tokens), : target_count(one)]
            .reshape(one.inputs["target_tokens"].shape)
            .copy()
            for row, one in enumerate(self.data, start=self.first)
        )


def _turns(calls: Sequence[TrainCall]) -> list[list[int]]:
    """Return the numbers of calls by their turn among those of their model."""
    seen: dict[str, int] = {}
    turns: list[list[int]] = []
    for number, call in enumerate(calls):
        turn = seen[call.model] = seen.get(call.model, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return turns


def _shape_of(part: Sequence[Datum]) -> Shape:
    return Shape(1, 0, len(part), max(len(one.tokens) for one in part))
