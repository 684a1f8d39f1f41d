"""A step that computes shared prefixes once: the losses and weights of the dense one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import ALL_ON, Make, batch_of, begun_with, largest_change, taught, weights_of

from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.rollouts import prefix_tree


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(300) for _ in range(40)] for _ in range(count)]


def without_tokens(metrics: dict[str, float | None]) -> dict[str, float | None]:
    shared = ("tokens/dense", "tokens/unique", "tokens/computed")
    return {name: value for name, value in metrics.items() if name not in shared}


@pytest.mark.parametrize("room", [0, prefix_tree.ROOM])
@pytest.mark.parametrize(("budget", "packing"), [(512, False), (512, True), (100_000, False)])
def test_five_steps_have_the_losses_and_weights_of_dense_ones(
    make: Make,
    build_model: Any,
    rng: random.Random,
    budget: int,
    packing: bool,
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In levels of single nodes, and with small groups in one row."""
    monkeypatch.setattr(prefix_tree, "ROOM", room)
    trainer = {"microbatch_tokens": budget, "lr": 1e-3}
    model, dense = make(**ALL_ON, trainer=trainer)
    trainer |= {"prefix_sharing": True, "packing": packing}
    other, sharing = make(**ALL_ON, trainer=trainer)
    teacher = build_model(2)
    for step in range(5):
        batch = begun_with(batch_of(model, rng, samples=12, pairs=5), *prompts(rng, 2))
        batch = replace(batch, step=step)
        expected, found = taught(dense, teacher, batch), taught(sharing, teacher, batch)
        assert without_tokens(found) == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert largest_change(weights_of(model), weights_of(other)) < 1e-5


def test_a_step_says_how_much_was_shared(make: Make, build_model: Any, rng: random.Random) -> None:
    _, sharing = make(**ALL_ON, trainer={"microbatch_tokens": 100_000, "prefix_sharing": True})
    model, _ = make()
    batch = begun_with(batch_of(model, rng, samples=8, pairs=5), *prompts(rng, 1))
    found = taught(sharing, build_model(2), batch)
    dense, unique, computed = (found[f"tokens/{name}"] for name in ("dense", "unique", "computed"))
    assert dense is not None
    assert unique is not None
    assert computed is not None
    saved = 40 * (8 + 2 * 5 - 1)  # the prompt of all samples and of both sides of the pairs
    assert unique <= dense - saved
    assert unique <= computed <= 1.5 * unique  # short sequences: padding counts


def test_a_teacher_computes_shared_contexts_once_with_the_same_states(
    make: Make, build_model: Any, rng: random.Random
) -> None:
    model, _ = make()
    views = begun_with(batch_of(model, rng, samples=6), *prompts(rng, 2)).views
    teacher, computed = build_model(2), list[int]()
    teacher.base_model.embed_tokens.register_forward_hook(
        lambda *call: computed.append(call[-1][..., 0].numel())
    )
    dense = hinted_states(teacher, views, 512)
    without = sum(computed)
    computed.clear()
    torch.testing.assert_close(hinted_states(teacher, views, 512, sharing="levels"), dense)
    assert sum(computed) < 0.7 * without
