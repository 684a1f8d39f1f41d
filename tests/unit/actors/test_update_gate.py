"""A step beside a copy of the weights: they do not change before the copy is made."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
import torch
from step_batches import Make, batch_of, weights_of

from composer_mesh.actors.trainer import UpdateGate

PATIENCE_S = 10.0
LONG_ENOUGH_S = 0.05
"""What a thread that should be blocked, and is not, is given to show it."""


class Updating:
    """A thread that does the work of a step's end: waits for the copy, then updates."""

    def __init__(self, held: UpdateGate) -> None:
        self.log: list[str] = []
        self._held = held
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._held.wait()
        self.log.append("updated")

    def blocked(self) -> bool:
        self._thread.join(LONG_ENOUGH_S)
        return self._thread.is_alive()

    def end(self) -> list[str]:
        self._thread.join(PATIENCE_S)
        return self.log


async def test_an_update_waits_for_the_copy_of_a_version_that_is_held() -> None:
    held = UpdateGate()
    held.hold(7)
    updating = Updating(held)
    assert updating.blocked()

    async def copy(version: int) -> int:
        assert held.held
        assert updating.blocked()
        updating.log.append(f"copied {version}")
        return version

    assert await held.copied(copy) == 7
    assert updating.end() == ["copied 7", "updated"]
    assert not held.held


async def test_a_copy_that_fails_leaves_nobody_waiting() -> None:
    held = UpdateGate()
    held.hold(7)
    updating = Updating(held)

    async def copy(version: int) -> None:
        await asyncio.sleep(0)
        raise OSError(f"no memory for {version}")

    with pytest.raises(OSError, match="for 7"):
        await held.copied(copy)
    assert updating.end() == ["updated"]


def test_nobody_waits_where_no_version_is_held() -> None:
    UpdateGate().wait()


def test_no_weight_changes_before_the_step_was_let_through(make: Make, rng: random.Random) -> None:
    model, step = make()
    before = weights_of(model)
    gradients: list[Any] = []

    def let_through() -> None:
        for name, weights in weights_of(model).items():
            assert torch.equal(weights, before[name]), name
        gradients.extend(one.grad for one in model.parameters() if one.grad is not None)

    step.run(batch_of(model, rng, samples=2, pairs=0), None, let_through)
    assert gradients
    assert any(not torch.equal(weights, before[n]) for n, weights in weights_of(model).items())


def test_a_step_that_is_not_let_through_leaves_the_weights(make: Make, rng: random.Random) -> None:
    model, step = make()
    before = weights_of(model)

    def refuse() -> None:
        raise TimeoutError("no copy")

    with pytest.raises(TimeoutError, match="no copy"):
        step.run(batch_of(model, rng, samples=2, pairs=0), None, refuse)
    assert all(torch.equal(weights, before[n]) for n, weights in weights_of(model).items())
