"""Steps of a mixture of experts: router replay, load balancing, and what the metrics tell.

Train/generate agreement: what is measured, in which direction, over which tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixture_runs import SIZES, coarse_folder, mixture_config, sampled_batch
from model_families import family_folder
from step_batches import NARROW, batch_of, nearby, own_logprobs
from torch import Tensor

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.logprob_mismatch import Figures, LogprobMismatch, figures
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.losses.policy import sampling_weights
from composer_mesh.rollouts.batches import PolicySample, StepBatch


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    return family_folder("qwen3_moe", tokenizer, tmp_path, **SIZES)


@pytest.fixture(autouse=True)
def no_group_stays() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_replay_divides_the_mismatch_of_a_bfloat16_mixture_by_five(
    tokenizer: Any, tmp_path: Path, build_config: Any
) -> None:
    folder = coarse_folder(tokenizer, tmp_path)
    moe = {"compare_every": 1, "router_float32": False}
    config = mixture_config(build_config, folder, moe=moe)
    figures = Learner(config, folder, Ranks()).train(sampled_batch(config, folder), None)
    without = figures["logprob_mismatch/without_replay/mean"]
    assert without > 5 * figures["logprob_mismatch/mean"]
    assert 0 < figures["moe/rerouted"] < 0.2


def test_in_float32_replay_changes_nothing(folder: Path, build_config: Any) -> None:
    config = mixture_config(build_config, folder, trainer={"compute_dtype": "float32"})
    config = build_config(
        policy={"path": folder},
        trainer={"moe": {"router_replay": True, "compare_every": 1}},
        generator={"max_new_tokens": 100},
    )
    figures = Learner(config, folder, Ranks()).train(sampled_batch(config, folder), None)
    assert figures["logprob_mismatch/mean"] < 1e-5
    assert figures["logprob_mismatch/without_replay/mean"] < 1e-5
    assert figures["moe/rerouted"] == 0


def test_the_balance_loss_moves_routers_towards_equal_experts(
    folder: Path, build_config: Any
) -> None:
    found = []
    for weight in (0.0, 1.0):
        moe = {"load_balancing": weight, "router_replay": False}
        config = mixture_config(build_config, folder, moe=moe, trainer={"lr": 3e-3})
        replayed = mixture_config(build_config, folder)
        batch, learner = sampled_batch(replayed, folder), Learner(config, folder, Ranks())
        figures = [
            learner.train(
                replace(
                    batch,
                    step=step,
                    samples=[replace(one, advantage=0.0, experts=None) for one in batch.samples],
                ),
                None,
            )
            for step in range(6)
        ]
        found.append([one["moe/balance_loss"] for one in figures])
    assert found[0][-1] == pytest.approx(found[0][0], rel=1e-3)
    assert found[1][-1] < found[1][0] - 0.01


def test_microbatches_add_up_to_the_balance_loss_of_the_batch(
    folder: Path, build_config: Any
) -> None:
    figures = []
    for tokens in (512, 100_000):
        moe = {"load_balancing": 0.1}
        trainer = {"microbatch_tokens": tokens}
        config = mixture_config(build_config, folder, moe=moe, trainer=trainer)
        batch = sampled_batch(config, folder)
        figures.append(Learner(config, folder, Ranks()).train(batch, None))
    few, many = (one["moe/balance_loss"] for one in figures)
    assert few == pytest.approx(many, rel=0.15)
    assert 1 < many < 3


BOUND = 0.25


def row(values: Sequence[float]) -> Tensor:
    return torch.tensor([list(values)])


def measured(differences: Sequence[float], current: Sequence[bool] | None = None) -> Figures:
    logprob_mismatch, ones = LogprobMismatch(BOUND), [True] * len(differences)
    logprobs, sampling = (
        row([difference - 1 for difference in differences]),
        row([-1.0] * len(ones)),
    )
    logprob_mismatch.note(logprobs, sampling, row(ones), row(current or ones))
    return figures([logprob_mismatch.totals])


def test_both_estimates_are_of_the_kl_from_the_sampler_to_the_trainer() -> None:
    # Four draws in exact proportion to the sampler: token a three times, token b once.
    sampler, trainer = {"a": 0.75, "b": 0.25}, {"a": 0.4, "b": 0.6}
    kl = sum(p * math.log(p / trainer[token]) for token, p in sampler.items())
    found = measured([math.log(trainer[token] / sampler[token]) for token in "aaab"])
    assert found["logprob_mismatch/kl_k1"] == pytest.approx(kl)
    assert found["logprob_mismatch/kl_k3"] == pytest.approx(kl)


def test_sizes_are_without_a_sign_and_the_bound_itself_is_not_above() -> None:
    found = measured([0.125, -0.25, 0.25, -0.5])
    assert found["logprob_mismatch/mean"] == 0.28125
    assert found["logprob_mismatch/max"] == 0.5
    assert found["logprob_mismatch/above"] == 0.25


def test_tokens_of_other_versions_are_left_out_of_the_engines_own_difference() -> None:
    found = measured([1e-6, 0.4, -2e-6], [True, False, True])
    assert found["logprob_mismatch/max"] == pytest.approx(0.4, rel=1e-3)
    assert found["logprob_mismatch/same_version/max"] < 3e-6
    assert found["logprob_mismatch/same_version/tokens"] == 2


def test_without_tokens_of_the_trained_version_their_figures_are_absent() -> None:
    found = measured([0.4, 0.1], [False, False])
    assert {name for name in found if "same_version" in name} == set()
    assert found["logprob_mismatch/mean"] == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1e4])
def test_what_is_no_number_is_the_largest_difference_and_yet_finite(broken: float) -> None:
    found = measured([0.0, broken])
    assert found["logprob_mismatch/max"] == 80
    assert all(math.isfinite(value) for value in found.values())


def test_what_stands_under_no_mask_does_not_count() -> None:
    logprob_mismatch, mask = LogprobMismatch(BOUND), torch.tensor([[True, False]])
    logprob_mismatch.note(row([-1.0, math.nan]), row([-1.0, 7.0]), mask, mask)
    assert figures([logprob_mismatch.totals])["logprob_mismatch/max"] == 0


def test_the_largest_difference_of_all_ranks_is_no_sum() -> None:
    parts = []
    for differences in ([0.5, 0.1], [0.7], []):
        logprob_mismatch, mask = LogprobMismatch(BOUND), row([True] * len(differences)).bool()
        if differences:
            logprob_mismatch.note(row(differences), torch.zeros_like(row(differences)), mask, mask)
        parts.append(logprob_mismatch.on_cpu())
    found = figures(parts)
    assert found["logprob_mismatch/max"] == pytest.approx(0.7)
    assert found["logprob_mismatch/mean"] == pytest.approx(1.3 / 3)
    assert found["logprob_mismatch/same_version/tokens"] == 3


def run(
    build_config: Any, model: Any, batch: StepBatch, budget: int = 10_000, **loss: Any
) -> dict[str, float | None]:
    trainer = {"lr": 1e-9, "microbatch_tokens": budget}
    config = build_config(**NARROW, trainer=trainer, loss=loss)
    found: dict[str, float | None] = OptimizerStep(model, None, config).run(batch, None)
    return {name: value for name, value in found.items() if name.startswith("logprob_mismatch/")}


@pytest.mark.parametrize("budget", [64, 150])
def test_a_step_measures_its_own_tokens_however_it_is_split(
    build_config: Any, build_model: Any, rng: random.Random, budget: int
) -> None:
    model = build_model(1)
    batch = batch_of(model, rng)
    gaps = torch.cat([_gaps(model, sample) for sample in batch.samples])
    found = run(build_config, model, batch, budget)
    assert found["logprob_mismatch/mean"] == pytest.approx(float(gaps.abs().mean()), rel=1e-4)
    assert found["logprob_mismatch/max"] == pytest.approx(float(gaps.abs().max()), rel=1e-4)
    assert found["logprob_mismatch/kl_k1"] == pytest.approx(float(-gaps.mean()), rel=1e-3, abs=1e-6)
    assert found["logprob_mismatch/same_version/tokens"] == batch.action_tokens


def test_an_exact_sampler_of_the_trained_version_agrees_to_float32(
    build_config: Any, build_model: Any, rng: random.Random
) -> None:
    model = build_model(1)
    found = run(build_config, model, batch_of(model, rng, noise=0.0))
    assert found["logprob_mismatch/same_version/mean"] < 1e-6
    assert found["logprob_mismatch/same_version/max"] < 1e-5


def test_one_mutated_log_prob_is_found(
    build_config: Any, build_model: Any, rng: random.Random
) -> None:
    model = build_model(1)
    batch = batch_of(model, rng, noise=0.0)
    first, *rest = batch.samples
    place = first.mask.index(True)
    logprobs = [*first.logprobs[:place], first.logprobs[place] - 3.0, *first.logprobs[place + 1 :]]
    mutated = replace(batch, samples=[*rest, replace(first, logprobs=logprobs)])
    found = run(build_config, model, mutated, 64)
    assert found["logprob_mismatch/same_version/max"] == pytest.approx(3.0, rel=1e-4)
    assert found["logprob_mismatch/above"] == pytest.approx(1 / batch.action_tokens)


def test_a_token_counts_as_current_by_its_own_version_and_the_steps(
    build_config: Any, build_model: Any, rng: random.Random
) -> None:
    """A rollout that was under way while version 3 came: its last token only is of that version."""
    model = build_model(1)
    batch = batch_of(model, rng, noise=0.0)
    samples = [replace(s, versions=[2 if m else -1 for m in s.mask]) for s in batch.samples]
    last = samples[0]
    place = len(last.mask) - 1 - last.mask[::-1].index(True)
    versions = [*last.versions[:place], 3, *last.versions[place + 1 :]]
    samples[0] = replace(last, versions=versions)
    found = run(build_config, model, replace(batch, step=3, samples=samples))
    assert found["logprob_mismatch/same_version/tokens"] == 1


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_the_weights_of_a_correction_are_measured(
    build_config: Any, build_model: Any, rng: random.Random, mode: Any
) -> None:
    model = build_model(1)
    batch = batch_of(nearby(build_model(1)), rng, noise=0.02)
    bounds: dict[str, Any] = {"maximum": 1.2, "minimum": 0.8}
    found = run(
        build_config,
        model,
        batch,
        64,
        correction=mode,
        correction_maximum=1.2,
        correction_minimum=0.8,
    )
    weights, bare = [], []
    for sample in batch.samples:
        own, then = own_logprobs(model, sample.ids).detach(), torch.tensor(sample.logprobs)[1:]
        mask = torch.tensor(sample.mask)[1:]
        weights.append(sampling_weights(own, then, mask, mode=mode, **bounds)[mask])
        free: dict[str, Any] = {"mode": mode, "maximum": None}
        bare.append(sampling_weights(own, then, mask, **free)[mask])
    flat, raw = torch.cat(weights), torch.cat(bare)
    effective = flat.sum() ** 2 / (flat.square().sum() * len(flat))
    assert found["logprob_mismatch/weight/mean"] == pytest.approx(float(flat.mean()), rel=1e-4)
    assert found["logprob_mismatch/weight/bounded"] == pytest.approx(
        float((flat != raw).float().mean())
    )
    assert found["logprob_mismatch/weight/effective"] == pytest.approx(float(effective), rel=1e-4)
    assert 0 < float(found["logprob_mismatch/weight/bounded"] or 0) < 1


def test_a_loss_without_correction_reports_no_weights(
    build_config: Any, build_model: Any, rng: random.Random
) -> None:
    model = build_model(1)
    found = run(build_config, model, batch_of(model, rng))
    assert {name for name in found if "weight" in name} == set()


def _gaps(model: Any, sample: PolicySample) -> Tensor:
    mask = torch.tensor(sample.mask)[1:]
    with torch.no_grad():
        own = own_logprobs(model, sample.ids)
    return (own - torch.tensor(sample.logprobs)[1:])[mask]
