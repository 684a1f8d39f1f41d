"""Ranks that divide the positions of their forwards: policies, and what steps of ranks do."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "helpers"))

import learning
from model_families import family_model

from composer_mesh.actors.models.expert_routing import choices_of
from composer_mesh.actors.models.policy import build_tokenizer, save_policy
from composer_mesh.actors.models.ranks import Division, Ranks
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "divided keys": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "repeated keys": ("mistral", {"num_attention_heads": 4, "sliding_window": 8}),
    "mixture": ("qwen3_moe", {"num_attention_heads": 4, "num_experts": 8}),
}
"""Families and sizes: two ranks divide two heads of keys, repeat one, and have experts."""

WHOLE = {"microbatch_tokens": 128, "packing": True}
"""What one rank does, and ranks that divide it: microbatches have the same sequences."""
BALANCED = {"moe": {"load_balancing": 0.1, "router_replay": True}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "divided keys": ("divided keys", {}, {}),
    "repeated keys": ("repeated keys", {"sharding": "none"}, {}),
    "mixture": ("mixture", BALANCED | {"activation_checkpointing": True}, {}),
    "adapters": ("divided keys", learning.ADAPTED, {}),
    "offloaded inputs": (
        "repeated keys",
        {"activation_checkpointing": True, "activation_offload": True},
        {},
    ),
    "updates": ("divided keys", learning.SEVERAL, learning.CORRECTED),
    "top k": (
        "repeated keys",
        {},
        {
            "sdpo": {
                "alpha": 0.5,
                "placement": "inline",
                "teacher": "trust_region",
                "teacher_output": "topk",
                "top_k": 5,
                "top_k_choice": "student",
            },
            "loss": {"type": "grpo", "entropy_coef": 0.1},
            "replay": {**learning.ALL_ON["replay"], "use_weighting": True},
        },
    ),
}
"""A policy, what the trainer does with it, and other sections."""


def write_policies(root: Path) -> dict[str, Any]:
    """Write the policies into folders of their names; return the models."""
    tokenizer = build_tokenizer([" ".join(dir(torch))] * 2, 400)
    found = {}
    for name, (family, sizes) in POLICIES.items():
        torch.manual_seed(2)
        model = family_model(family, tokenizer, **sizes)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=0.3)
        save_policy(model.eval(), tokenizer, root / name)
        found[name] = model
    return found


def with_experts(steps: Sequence[StepBatch], model: Any) -> list[StepBatch]:
    """The steps with experts, chosen at random, of every position of each sample but a few."""
    torch.manual_seed(3)

    def experts(count: int) -> Any:
        scores = torch.rand(count, model.config.num_hidden_layers, model.config.num_experts)
        return choices_of(scores.topk(model.config.num_experts_per_tok).indices, model.config)

    return [
        replace(
            step,
            samples=[
                replace(one, experts=experts(len(one.ids) - 1)) if place % 3 else one
                for place, one in enumerate(step.samples)
            ],
        )
        for step in steps
    ]


def batches(model: Any) -> list[StepBatch]:
    """Three steps, with experts for a mixture; of the last one only sample's end is trained."""
    first, second, *_, last = learning.batches(model)
    (sample,) = last.samples
    end = [place >= len(sample.ids) - 2 for place in range(len(sample.ids))]
    last = replace(last, samples=[replace(sample, mask=end)], step=2)
    steps = [first, replace(second, step=1), last]
    return with_experts(steps, model) if hasattr(model.config, "num_experts") else steps


def config(case: str, root: Path, ranks: int = 1, context: int = 1) -> Config:
    """The run of a case."""
    policy, trainer, sections = CASES[case]
    size = {"ranks": ranks, "context_parallel": context}
    return learning.config(WHOLE | trainer | size, policy={"path": root / policy}, **sections)


def trained(case: str, root: Path, ranks: Ranks, steps: Any, context: int = 1) -> Any:
    """Metrics of the steps, gradients of the first, and the weights after the last."""
    settings = config(case, root, ranks.size, context)
    return learning.five_steps(settings, root / CASES[case][0], ranks, steps[CASES[case][0]])


def lost(root: Path, ranks: Ranks, steps: Any, at: int) -> Any:
    """A step whose signals one rank loses, without sharded weights, and another after it."""
    case = "repeated keys"
    settings = config(case, root, ranks.size, ranks.size)
    return learning.lost(settings, root / CASES[case][0], ranks, steps[CASES[case][0]][0], at)


def every(rank: int, size: int, context: int, cases: Sequence[str], root: Path, steps: Any) -> None:
    """What each of several processes does, in the same order; the results lie in `root` then."""
    torch.set_num_threads(1)
    random.seed(rank)
    ranks = Ranks.connect(rank, size, root / f"rendezvous-{size}", 60.0)
    ranks.divide(Division(context))
    found = {case: trained(case, root, ranks, steps, context) for case in cases}
    if size == context:
        found["lost"] = lost(root, ranks, steps, at=1)
    torch.save(found, root / f"rank-{rank}-of-{size}.pt")
