"""Executes clients' operations on their models, without messaging.

Adapters of several models are trained on one frozen base in common forwards; the state of a model
depends only on its own operations and on the shapes in which they were computed.

Several ranks hold the same states, or of all weights each its rows; all of them execute the same
calls: they divide the rows of each forward, add the same gradients, and make the same optimizer
step. The first one writes files.

The policy is whole on one rank, and sharded over several: see `place_policy`.
"""

import logging
import math
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import empty_model, load_model
from composer_mesh.actors.models.ranks import Ranks, RanksLost
from composer_mesh.actors.models.trained_model import frozen_model, trained_model
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.batches import (
    Batch,
    TokenLimit,
    batches,
    microbatches,
    target_count,
)
from composer_mesh.plugins.tinker.models.forwards import TOTAL, CallRows, Computed, Forwards, joined
from composer_mesh.plugins.tinker.models.messages import (
    CHANGES,
    BatchShape,
    Datum,
    ModelNotOpen,
    ModelSpec,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.models.model_state import (
    ModelState,
    StoredState,
    UnusableState,
    read_state,
    write_state,
)
from composer_mesh.plugins.tinker.models.trained_weights import (
    ActiveAdapters,
    AdapterWeights,
    FullWeights,
    ModelWeights,
    adapt,
)

logger = logging.getLogger(__name__)

FORWARDS = ("forward", "forward_backward")


class ClientTrainer:
    """Holds clients' models and executes their calls; one caller at a time."""

    def __init__(
        self,
        base: Any,
        weights: ModelWeights,
        most_tokens: int,
        most_models: int,
        ranks: Ranks | None = None,
    ) -> None:
        """`most_tokens` are the padded tokens of one forward, on each rank."""
        self.models: dict[str, ModelState] = {}
        self._ranks = ranks or Ranks()
        self._weights, self._most_models = weights, most_models
        self._most = TokenLimit(most_tokens, self._ranks.size)
        self._forwards = Forwards(base, weights, self._ranks)
        self.vocabulary, self._device = self._forwards.vocabulary, self._forwards.device

    def open(self, name: str, spec: ModelSpec, path: Path | None) -> int:
        """Take a model in, from its file where it has one; return its position."""
        numbers = self._weights.initial(spec).to(self._device)
        state = ModelState(spec, numbers, self._weights.numbers)
        if path is not None:
            state.resume(self._fitting(path, state))
        self.models[name] = state
        return state.position

    def close(self, name: str) -> None:
        """Forget a model."""
        self.models.pop(name, None)

    def save(self, name: str, path: Path, weights_only: bool = False) -> int:
        """Write a model's state on rank 0; return the bytes of the file there, 0 elsewhere."""
        return self._write(path, self.models[name].stored(weights_only))

    def _write(self, path: Path, stored: StoredState) -> int:
        return write_state(path, stored) if self._ranks.rank == 0 else 0

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
            found = {id(one): result for one, result in self._all_forwards(forwards)}
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
        state = self.models[call.model]
        if call.kind == "save":
            stored = state.stored(weights_only=not call.optimizer)
            size = self._ranks.agreed(lambda: self._write(Path(call.path), stored))
            return TrainResult(metrics={"bytes": float(size)})
        try:
            metrics = self._changed(call, state)
        except ValueError as error:
            return TrainResult(error=str(error))
        state.position += 1
        return TrainResult(metrics=metrics)

    def _changed(self, call: TrainCall, state: ModelState) -> dict[str, float]:
        """Make an optimizer step, or take stored weights; raises ValueError, changing nothing."""
        if call.kind == "optim_step":
            assert call.adam is not None
            return state.step(call.adam)
        state.restore(self._fitting(Path(call.path), state), call.optimizer)
        return {}

    def _fitting(self, path: Path, state: ModelState) -> StoredState:
        """Return a model's stored state; where a rank cannot read it, no rank does."""
        return self._ranks.agreed(lambda: self._read(path, state))

    def _read(self, path: Path, state: ModelState) -> StoredState:
        stored = read_state(path)
        if self._weights.key(stored.spec) != self._weights.key(state.spec):
            raise UnusableState(
                str(path), f"it is of {stored.spec}, and this model is of {state.spec}"
            )
        if stored.tensors["weights"].shape != (state.count,):
            raise UnusableState(str(path), "it is of another base model")
        return stored

    def _all_forwards(self, calls: Sequence[TrainCall]) -> list[tuple[TrainCall, TrainResult]]:
        keyed = [(call, self._key(call)) for call in calls]
        return [
            pair
            for batch in batches(keyed, self._most, self._most_models)
            for pair in zip(batch.calls, self._forward(batch), strict=True)
        ]

    def _key(self, call: TrainCall) -> Hashable:
        spec = self.models[call.model].spec
        targets = max(target_count(one) for one in call.data)
        alone = call.model if spec.rank == 0 else ""
        return (alone, call.kind, targets, self._weights.key(spec))

    def _forward(self, batch: Batch) -> list[TrainResult]:
        """Run a batch; where it fails unexpectedly, its calls alone, so that none harms another."""
        before = {call.model: self.models[call.model].gradient for call in batch.calls}
        try:
            return self._together(batch)
        except RanksLost:
            raise
        except Exception as error:  # supervision boundary: of a client's data, not of the trainer
            for model, gradient in before.items():
                self.models[model].gradient = gradient
            if len(batch.calls) == 1:
                logger.exception("an operation of %s failed", batch.calls[0].model)
                return [TrainResult(error=f"the trainer failed: {type(error).__name__}: {error}")]
        return [
            result
            for call in batch.calls
            for one in batches([(call, None)], self._most, 1)
            for result in self._forward(one)
        ]

    def _together(self, batch: Batch) -> list[TrainResult]:
        """Run the forward, and the backward, of calls that share one; moves their positions."""
        if len(batch.calls) == 1:
            found = [self._alone(batch.calls[0], batch.shapes[0])]
        else:
            owners = zip(batch.calls, batch.shapes, strict=True)
            found = self._part([CallRows(call, call.data, shape) for call, shape in owners])
        for call, result in zip(batch.calls, found, strict=True):
            self.models[call.model].position += call.kind in CHANGES and not result.error
        return found

    def _alone(self, call: TrainCall, shape: BatchShape) -> TrainResult:
        """Run a call's microbatches; a failed one takes back those before it."""
        state, found = self.models[call.model], list[TrainResult]()
        before = state.gradient
        parts = microbatches(call, shape, self._most)
        for part in parts:
            own = shape if len(parts) == 1 else _shape_of(part)
            found += self._part([CallRows(call, part, own)])
            if found[-1].error:
                state.gradient = before
                return found[-1]
        return joined(found, shape)

    def _part(self, owners: Sequence[CallRows]) -> list[TrainResult]:
        """Run one forward of some models' rows; add their gradients where these are finite."""
        states = [self.models[one.call.model] for one in owners]
        flats = {one.call.model: state.weights for one, state in zip(owners, states, strict=True)}
        found = self._forwards.run(owners, states[0].spec, flats)
        return [self._settled(*one) for one in zip(owners, states, found, strict=True)]

    def _settled(self, owner: CallRows, state: ModelState, found: Computed) -> TrainResult:
        """Add a call's gradient where it is finite; return its result."""
        loss = found.metrics[TOTAL]
        if not math.isfinite(loss) or not (
            found.gradient is None or state.accumulate(found.gradient)
        ):
            return TrainResult(
                error=f"the loss is {loss} or its gradient is not finite: nothing was added; look "
                "for values that are not finite, or too large, in the data"
            )
        return TrainResult(found.logprobs, found.metrics, owner.shape)


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


def _shape_of(part: Sequence[Datum]) -> BatchShape:
    return BatchShape(1, 0, len(part), max(len(one.tokens) for one in part))


def make_trainer(config: Config, folder: Path, ranks: Ranks) -> ClientTrainer:
    """Return a trainer without models. All ranks make theirs together. Raises `UnfitModel`."""
    base, weights = place_policy(config, folder, ranks)
    tokens, models = config.trainer.microbatch_tokens, config.serve.batched_models
    return ClientTrainer(base, weights, tokens, models, ranks)


def place_policy(config: Config, folder: Path, ranks: Ranks) -> tuple[Any, ModelWeights]:
    """Return the policy on this rank, and how models' numbers enter it."""
    alpha = config.serve.lora_alpha
    if ranks.size == 1:
        base = load_model(folder).to(ranks.device)
        LanguageModel(base).check_head()
        LanguageModel(base).check_rows()
        full = config.serve.full_weights
        return base, FullWeights(base, ranks) if full else AdapterWeights(base, alpha)
    if config.serve.full_weights:
        base = trained_model(config, folder, ranks)
        return base, FullWeights(base, ranks)
    active = ActiveAdapters(1.0)
    base = frozen_model(config, folder, ranks, adapt=partial(adapt, active=active))
    return base, AdapterWeights(empty_model(folder), alpha, (base, active))
