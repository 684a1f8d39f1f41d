"""The replay channel: each preference loss is its function on whole logits; SimPO stands alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from step_batches import (
    ALL_ON,
    NARROW,
    assert_gradients_are,
    gradients_of,
    ids_of,
    nearby,
    own_logprobs,
)
from torch import Tensor

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.reference import score_pairs
from composer_mesh.losses.preference import (
    PreferenceLoss,
    collision_logprobs,
    dpo_loss,
    ipo_loss,
    mpo_loss,
    simpo_loss,
)
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.step_plan import pair_tokens

BETA = 0.3
Sides = tuple[Tensor, Tensor]
Preference = Callable[[Sides, Sides, Sides, int], PreferenceLoss]


def dpo(beta: float, smoothing: float = 0.0) -> Preference:
    return lambda own, frozen, _, count: dpo_loss(
        *own, *frozen, beta=beta, label_smoothing=smoothing, normalizer=count
    )


def ipo(beta: float) -> Preference:
    return lambda own, frozen, lengths, count: ipo_loss(
        *own, *frozen, *lengths, beta=beta, normalizer=count
    )


def simpo(beta: float, gamma: float, smoothing: float = 0.0) -> Preference:
    return lambda own, _, lengths, count: simpo_loss(
        *own, *lengths, beta=beta, gamma=gamma, label_smoothing=smoothing, normalizer=count
    )


def typed(loss_type: str, **options: Any) -> Preference:
    return lambda own, frozen, _, count: dpo_loss(
        *own, *frozen, beta=0.1, loss_type=loss_type, normalizer=count, **options
    )


def averaged(beta: float) -> Preference:
    return lambda own, frozen, lengths, count: dpo_loss(
        *own, *frozen, *lengths, beta=beta, normalizer=count
    )


def mixed(**options: Any) -> Preference:
    return lambda own, frozen, lengths, count: mpo_loss(
        *own, *frozen, *lengths, beta=0.1, normalizer=count, **options
    )


CASES: dict[str, tuple[dict[str, Any], Preference]] = {
    "dpo": ({}, dpo(0.1)),
    "dpo strong": ({"dpo_beta": 0.7}, dpo(0.7)),
    "dpo smoothed": ({"dpo_beta": 0.7, "label_smoothing": 0.2}, dpo(0.7, 0.2)),
    "ipo": ({"loss": "ipo", "dpo_beta": 0.2}, ipo(0.2)),
    "sigmoid_norm": ({"loss": "sigmoid_norm", "dpo_beta": 0.9}, averaged(0.9)),
    "hinge": ({"loss": "hinge"}, typed("hinge")),
    "exo_pair": (
        {"loss": "exo_pair", "label_smoothing": 1e-3},
        typed("exo_pair", label_smoothing=1e-3),
    ),
    "apo_zero": ({"loss": "apo_zero"}, typed("apo_zero")),
    "apo_down": ({"loss": "apo_down"}, typed("apo_down")),
    "bco_pair": ({"loss": "bco_pair"}, typed("bco_pair")),
    "js divergence": (
        {"f_divergence_type": "js_divergence"},
        typed("sigmoid", f_divergence_type="js_divergence"),
    ),
    "alpha divergence": (
        {"f_divergence_type": "alpha_divergence", "f_alpha": 0.3},
        typed("sigmoid", f_divergence_type="alpha_divergence", f_alpha=0.3),
    ),
    "mpo": ({"loss": "mpo"}, mixed()),
    "mpo mixed": (
        {"loss": "mpo", "mpo_types": {"dpo": 0.5, "ipo": 0.1}},
        mixed(loss_types={"sigmoid": 0.5, "ipo": 0.1}),
    ),
    "simpo": ({"loss": "simpo"}, simpo(2.0, 0.5)),
    "simpo wide": (
        {"loss": "simpo", "simpo_beta": 1.5, "simpo_gamma": 1.2, "label_smoothing": 0.1},
        simpo(1.5, 1.2, 0.1),
    ),
}


def pairs_of(rng: random.Random, count: int) -> list[PairSample]:
    """Each third pair has a context of which 64 tokens hold one side at a time."""
    begins = [[rng.randrange(3, 300) for _ in range(30 * (n % 3 == 2))] for n in range(count)]
    return [
        PairSample(f"p{n}", [*begin, *ids_of(rng, 12)], ids_of(rng, 9), ids_of(rng, 9))
        for n, begin in enumerate(begins)
    ]


def sides_of(model: Any, pairs: list[PairSample]) -> Sides:
    """Log-probs [B] of chosen and rejected answers, each from a forward of its own."""

    def answer(context: list[int], ids: list[int]) -> Tensor:
        return own_logprobs(model, context + ids)[-len(ids) :].sum()

    chosen = torch.stack([answer(pair.context_ids, pair.chosen_ids) for pair in pairs])
    return chosen, torch.stack([answer(pair.context_ids, pair.rejected_ids) for pair in pairs])


def scored(pairs: list[PairSample], reference: Sides) -> list[PairSample]:
    """The pairs with what a reference said about them."""
    both = zip(*(side.tolist() for side in reference), strict=True)
    return [replace(pair, reference=scores) for pair, scores in zip(pairs, both, strict=True)]


def lengths_of(pairs: list[PairSample]) -> Sides:
    chosen = torch.tensor([len(pair.chosen_ids) for pair in pairs])
    return chosen, torch.tensor([len(pair.rejected_ids) for pair in pairs])


@pytest.fixture
def step_of(build_config: Any, build_model: Any) -> Callable[..., Any]:
    """Model, frozen neighbour and step; the step never has the neighbour."""

    def build(section: dict[str, Any], budget: int = 64) -> Any:
        config = build_config(
            **NARROW,
            replay={**ALL_ON["replay"], "beta": BETA, **section},
            trainer={"grad_clip": 1e9, "microbatch_tokens": budget},
        )
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        return model, frozen, OptimizerStep(model, None, config)

    return build


@pytest.mark.parametrize(("name", "budget"), [*zip(CASES, cycle([64, 10_000]))])
def test_a_step_has_the_loss_and_gradients_of_its_function_however_it_is_split(
    step_of: Callable[..., Any], rng: random.Random, name: str, budget: int
) -> None:
    section, function = CASES[name]
    model, frozen, step = step_of(section, budget)
    pairs = pairs_of(rng, 7)
    with torch.no_grad():
        reference = sides_of(frozen, pairs)
    pairs = scored(pairs, reference)
    expected = function(sides_of(model, pairs), reference, lengths_of(pairs), len(pairs))
    gradients = gradients_of(BETA * expected.loss, model)
    metrics = step.run(StepBatch(0, [], [], pairs), None)
    assert metrics["loss/replay"] == pytest.approx(expected.loss.item(), rel=1e-4)
    assert metrics["loss/total"] == pytest.approx(BETA * expected.loss.item(), rel=1e-4)
    for figure in ("accuracy", "margin", "chosen_reward", "rejected_reward"):
        value = getattr(expected, figure).item()
        assert metrics[f"replay/{figure}"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert_gradients_are(gradients, model)


def answer_tokens(model: Any, context: list[int], ids: list[int]) -> tuple[Tensor, Tensor]:
    """Log-prob and log-collision probability of each token of an answer."""
    logits = model(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
    logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    return logprobs, collision_logprobs(logits)


@pytest.mark.parametrize("budget", [64, 10_000])
def test_ld_alpha_weighs_the_longer_answers_rest_in_policy_and_reference(
    step_of: Callable[..., Any], rng: random.Random, budget: int
) -> None:
    model, frozen, step = step_of({"ld_alpha": 0.3}, budget)
    pairs = pairs_of(rng, 5)

    def sides(of: Any) -> Sides:
        found: Sequence[list[Tensor]] = ([], [])
        for pair in pairs:
            shared = min(len(pair.chosen_ids), len(pair.rejected_ids))
            for side, ids in zip(found, (pair.chosen_ids, pair.rejected_ids), strict=True):
                tokens, _ = answer_tokens(of, pair.context_ids, ids)
                side.append(tokens[:shared].sum() + 0.3 * tokens[shared:].sum())
        return torch.stack(found[0]), torch.stack(found[1])

    scores = score_pairs(LanguageModel(frozen), pairs, budget, 0.3)
    with torch.no_grad():
        reference = sides(frozen)
    torch.testing.assert_close(torch.tensor(scores), torch.stack(reference, -1))
    expected = dpo_loss(*sides(model), *reference, normalizer=5)
    gradients = gradients_of(BETA * expected.loss, model)
    metrics = step.run(StepBatch(0, [], [], scored(pairs, reference)), None)
    assert metrics["loss/replay"] == pytest.approx(expected.loss.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_use_weighting_counts_pairs_by_how_typical_their_answers_are(
    step_of: Callable[..., Any], rng: random.Random, loss: str
) -> None:
    model, frozen, step = step_of({"loss": loss, "use_weighting": True})
    pairs = pairs_of(rng, 5)
    with torch.no_grad():
        reference = sides_of(frozen, pairs)
        weights = []
        for pair in pairs:
            both = [
                answer_tokens(model, pair.context_ids, ids)
                for ids in (pair.chosen_ids, pair.rejected_ids)
            ]
            weights.append(torch.stack([(p - c).mean() for p, c in both]).sum().exp())
    own, options = sides_of(model, pairs), {"weights": torch.stack(weights), "normalizer": 5}
    if loss == "simpo":
        expected = simpo_loss(*own, *lengths_of(pairs), **options)
    else:
        expected = dpo_loss(*own, *reference, **options)
    gradients = gradients_of(BETA * expected.loss, model)
    metrics = step.run(StepBatch(0, [], [], scored(pairs, reference)), None)
    assert metrics["loss/replay"] == pytest.approx(expected.loss.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo"])
def test_only_simpo_needs_no_reference(build_config: Any, loss: str) -> None:
    config = build_config(replay={**ALL_ON["replay"], "loss": loss})
    assert config.replay.needs_reference == (loss != "simpo")
    off = build_config(replay={**ALL_ON["replay"], "loss": loss, "beta": 0.0})
    assert not off.replay.needs_reference


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo"])
def test_a_step_never_runs_the_reference_that_the_policy_loss_has(
    build_config: Any, build_model: Any, rng: random.Random, loss: str
) -> None:
    model, reference = build_model(1), build_model(2)
    runs = []
    reference.base_model.register_forward_hook(lambda *_: runs.append("decoder"))
    config = build_config(
        loss={"kl_beta": 0.1}, replay={**ALL_ON["replay"], "loss": loss, "beta": BETA}
    )
    step, pairs = OptimizerStep(model, reference, config), pairs_of(rng, 3)
    batch = StepBatch(0, [], [], [replace(pair, reference=(-1.0, -2.0)) for pair in pairs])
    assert step.run(batch, None)["loss/replay"] is not None
    assert runs == []


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_pairs_without_a_reference_are_refused_by_the_others(
    build_config: Any, build_model: Any, rng: random.Random, loss: str
) -> None:
    config = build_config(replay={**ALL_ON["replay"], "loss": loss})
    step = OptimizerStep(build_model(1), None, config)
    with pytest.raises(
        ValueError, match=r"2 of 2 pairs have no reference log-probs \(first: p[01]\)"
    ):
        step.run(StepBatch(0, [], [], pairs_of(rng, 2)), None)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_training_raises_the_chosen_answers_over_the_rejected_ones(
    build_config: Any, build_model: Any, rng: random.Random, name: str
) -> None:
    replay = {**ALL_ON["replay"], "beta": 1.0, "loss": name}
    config = build_config(replay=replay, trainer={"lr": 3e-3})
    model, pairs = build_model(1), pairs_of(rng, 4)
    with torch.no_grad():
        pairs = scored(pairs, sides_of(model, pairs))
    step, batch = OptimizerStep(model, None, config), StepBatch(0, [], [], pairs)
    losses = [step.run(batch, None)["loss/replay"] or 0.0 for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_no_forward_takes_more_tokens_than_a_microbatch(
    step_of: Callable[..., Any], rng: random.Random
) -> None:
    budget = 64
    model, frozen, step = step_of({}, budget)
    pairs, seen = pairs_of(rng, 9), list[int]()
    assert max(map(pair_tokens, pairs)) > budget
    for one in (model, frozen):
        embedding = one.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0].numel()))
    reference = torch.tensor(score_pairs(LanguageModel(frozen), pairs, budget)).T
    step.run(StepBatch(0, [], [], scored(pairs, (reference[0], reference[1]))), None)
    assert max(seen) <= budget


@pytest.mark.parametrize("budget", [64, 10_000])
def test_the_reference_scores_each_pair_as_alone_however_it_is_batched(
    build_model: Any, rng: random.Random, budget: int
) -> None:
    model, pairs = build_model(3), pairs_of(rng, 9)
    with torch.no_grad():
        alone = [sides_of(model, [pair]) for pair in pairs]
    scores = score_pairs(LanguageModel(model), pairs, budget)
    expected = [(float(chosen), float(rejected)) for chosen, rejected in alone]
    assert scores == [pytest.approx(pair, rel=1e-5) for pair in expected]
    assert score_pairs(LanguageModel(model), [], budget) == []


@pytest.mark.parametrize("section", [{}, {"use_weighting": True}, {"loss": "ipo"}])
@pytest.mark.parametrize("budget", [64, 10_000])
def test_a_weight_multiplies_the_loss_of_its_pair_and_none_of_its_figures(
    step_of: Callable[..., Any], rng: random.Random, section: dict[str, Any], budget: int
) -> None:
    weights = [1.0, 0.25, 0.5]
    pairs, alone = pairs_of(rng, 3), list[float]()
    _, frozen, step = step_of(section, budget)
    with torch.no_grad():
        pairs = scored(pairs, sides_of(frozen, pairs))
    for pair in pairs:
        found = step_of(section, budget)[2].run(StepBatch(0, [], [], [pair]), None)
        alone.append(found["loss/replay"])
    plain = step_of(section, budget)[2].run(StepBatch(0, [], [], pairs), None)
    weighed = [replace(pair, weight=own) for pair, own in zip(pairs, weights, strict=True)]
    found = step.run(StepBatch(0, [], [], weighed), None)
    expected = sum(own * loss for own, loss in zip(weights, alone, strict=True)) / 3
    assert found["loss/replay"] == pytest.approx(expected, rel=1e-4)
    assert found["replay/margin"] == pytest.approx(plain["replay/margin"], rel=1e-4)
