"""Ranks that divide the experts of a mixture's layers: what their steps and checkpoints do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import contexts
import learning
import torch

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.expert_parallel import expert_modules
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Division, Ranks
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch

PROMPT = 66
"""Tokens before each sequence, so many that a microbatch of 128 has one: balance is its own."""
BALANCED = {"microbatch_tokens": 128} | contexts.BALANCED
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": (BALANCED, {"expert_parallel": 2}),
    "checkpointed": (BALANCED | {"activation_checkpointing": True}, {"expert_parallel": 2}),
    "adapters": (BALANCED | {"lora": {"rank": 2}}, {"expert_parallel": 2}),
    "contexts": (
        BALANCED | {"packing": True, "microbatch_tokens": 256},
        {"expert_parallel": 2, "context_parallel": 2},
    ),
}
"""What the trainer does, on one rank too, and how several divide it."""


def batches(model: Any) -> list[StepBatch]:
    """Three steps with experts, of the last of which one rank has no sample."""
    first, second, *_, last = learning.batches(model)
    steps = [first, second, replace(last, step=2)]
    return contexts.with_experts(learning.with_prompts(steps, PROMPT), model)


def config(case: str, folder: Path, ranks: int) -> Config:
    """The run of a case."""
    trainer, divided = CASES[case]
    several = divided | {"ranks": ranks} if ranks > 1 else {}
    policy = {"path": folder, "max_context": 128}
    return learning.config(trainer | several, policy=policy)


def trained(case: str, folder: Path, ranks: Ranks, steps: Sequence[StepBatch]) -> Any:
    """Metrics of the steps, gradients of the first, and the weights after the last."""
    return learning.five_steps(config(case, folder, ranks.size), folder, ranks, steps)


def saved(folder: Path, ranks: Ranks, steps: Sequence[StepBatch], checkpoint: Path) -> Any:
    """Save after two steps and go on; what ranks store of the experts, and what follows."""
    settings = config("experts", folder, ranks.size)
    found = learning.saved(settings, folder, ranks, steps, checkpoint)
    learner = Learner(settings, folder, ranks)
    own = {name: learning.local(one) for name, one in learner.export().items()}
    stored = {name: tuple(one.shape) for name, one in own.items()}
    return found | {"stored": stored, "apart": apart(learner.model)}


def apart(model: Any) -> list[bool]:
    """Whether each layer's experts are not gathered when they compute. All ranks together."""
    found: list[bool] = []
    for module in expert_modules(model):
        module.register_forward_pre_hook(
            lambda one, _: found.append(learning.is_dtensor(one.down_proj))
        )
    with torch.no_grad():
        LanguageModel(model).hidden([[1, 2, 3]])
    return found


def every(rank: int, size: int, cases: Sequence[str], root: Path, steps: Any) -> None:
    """What each of several processes does, in the same order; the results lie in `root` then."""
    torch.set_num_threads(1)
    folder = root / "mixture"
    ranks = Ranks.connect(rank, size, root / f"rendezvous-{size}", 60.0)
    ranks.divide(Division(experts=2))
    contexts_of = [case for case in cases if case == "contexts"]
    found = {case: trained(case, folder, ranks, steps) for case in cases if case not in contexts_of}
    if size == 2:
        checkpoints = root / "checkpoints"
        found["saved"] = saved(folder, ranks, steps, checkpoints / "of-two")
        settings = config("experts", folder, size)
        found["from one"] = learning.gone_on(
            settings, folder, ranks, steps[2:], checkpoints / "of-one"
        )
    if contexts_of:
        ranks.divide(Division(context=2, experts=2))
    for case in contexts_of:
        found[case] = trained(case, folder, ranks, steps)
    torch.save(found, root / f"rank-{rank}-of-{size}.pt")
