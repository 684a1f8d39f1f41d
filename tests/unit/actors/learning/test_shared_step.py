"""A step that computes shared prefixes once: the losses and weights of the dense one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from repetition import LONG
from step_batches import ALL_ON, Make, batch_of, begun_with, largest_change, taught, weights_of

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts import prefix_tree
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, plan_step, teacher_rounds


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(300) for _ in range(40)] for _ in range(count)]


def without_tokens(metrics: dict[str, float | None]) -> dict[str, float | None]:
    shared = ("tokens/dense", "tokens/unique", "tokens/computed", "tokens/computed_over_unique")
    return {name: value for name, value in metrics.items() if name not in shared}


@pytest.mark.parametrize("row_capacity", [0, prefix_tree.ROW_CAPACITY])
@pytest.mark.parametrize(
    ("budget", "packing"), [(512, False), (512, True), pytest.param(100_000, False, marks=LONG)]
)
def test_five_steps_have_the_losses_and_weights_of_dense_ones(
    make: Make,
    build_model: Any,
    rng: random.Random,
    budget: int,
    packing: bool,
    row_capacity: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In levels of single nodes, and with small groups in one row."""
    monkeypatch.setattr(prefix_tree, "ROW_CAPACITY", row_capacity)
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
    assert found["tokens/computed_over_unique"] == pytest.approx(computed / unique)


@pytest.mark.parametrize("sharing", ["levels", "row"])
@pytest.mark.parametrize("seed", range(5))
def test_one_long_sequence_beside_many_short_ones_of_groups_keeps_to_the_budget(
    build_model: Any, seed: int, sharing: Sharing
) -> None:
    """Computed positions, what losses read among them, are those of the plan."""
    rng, budget = random.Random(seed), 1200
    starts = prompts(rng, 3)
    lengths = [1100, *(rng.randrange(1, 12) for _ in range(30)), 300, 280]
    ids = [rng.choice(starts) + prompts(rng, 1)[0][:1] * length for length in lengths]
    samples = [PolicySample(str(n), one, [], [], 1.0, []) for n, one in enumerate(ids)]
    (plan,) = plan_step(StepBatch(0, samples, [], []), budget, sharing=sharing)
    model = LanguageModel(build_model(2), packing=True, sharing=sharing)
    for microbatch in plan.microbatches:
        model.forwards = 0
        with torch.no_grad():
            found = model.hidden([samples[place].ids for place in microbatch.samples])
        assert len(found.computed) <= 1.2 * budget
        assert model.forwards == microbatch.forwards
    assert sum(map(len, ids)) > 1.5 * budget


@pytest.mark.parametrize("row_capacity", [0, prefix_tree.ROW_CAPACITY])
def test_error_sites_of_a_trace_and_the_other_traces_share_what_comes_before_them(
    build_model: Any, rng: random.Random, row_capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "ROW_CAPACITY", row_capacity)
    (prompt, *turns), hint = prompts(rng, 13), [11, 12, 13]
    views = []
    for trace in range(3):
        context = prompt
        for site in range(4):
            turn = turns[4 * trace + site]
            rows = [len(context) - 1, len(context)]
            hinted = [row + len(hint) for row in rows]
            view = HintedView(str(trace), site, context + hint + turn, rows, hinted, turn[:2])
            views.append(view)
            context = context + turn
    teacher, computed = build_model(2), list[int]()
    teacher.base_model.embed_tokens.register_forward_hook(
        lambda *call: computed.append(call[-1][..., 0].numel())
    )
    dense = hinted_states(teacher, views, 4096)
    computed.clear()
    torch.testing.assert_close(hinted_states(teacher, views, 4096, sharing="levels"), dense)
    unique = unique_ids([view.teacher_ids for view in views])
    assert unique <= 40 + 3 * (3 * 40 + 4 * (len(hint) + 40))
    assert sum(computed) <= 1.3 * unique  # of 1.7 times as many
    plans = [RankPlan([Microbatch([], [*range(len(views))])], [])]
    batch = StepBatch(0, [], views, [])
    assert teacher_rounds(batch, plans, 4096, "levels") == [len(computed)]


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
