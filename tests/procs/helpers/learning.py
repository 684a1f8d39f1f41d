"""Trainer ranks without Monarch: a tiny policy, batches of three channels, and what steps do.

The same functions train in the test's own process, which is one rank, and in several processes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "helpers"))

from optimizer_runs import save
from step_batches import ALL_ON, batch_of, begun_with

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import build_model, build_tokenizer, save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor, local
from composer_mesh.actors.reference import score_pairs
from composer_mesh.actors.teacher_outputs.messages import TeacherOutputsLost
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.prefix_tree import ROW_CAPACITY

Metrics = dict[str, Any]
Weights = dict[str, Tensor]

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "ranks", "seed": 3, "steps": 5},
    "data": {"task": "toolbox"},
    "environment": {"max_turns": 2},
    "policy": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "layers": 2,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 400,
        "max_context": 64,
    },
    "generator": {"max_new_tokens": 10},
    "loss": {"type": "grpo", "kl_beta": 0.05},
    "sdpo": {"alpha": 0.5, "placement": "inline", "teacher": "ema", "ema_rate": 0.3},
    "replay": ALL_ON["replay"],
    "trainer": {"lr": 1e-3, "microbatch_tokens": 64},
}
WHOLE = {"microbatch_tokens": 1024}
"""Room for all that a step has, in one microbatch."""
LARGE = 50
SHARDED = {"ranks": 2, "packing": True}
SHARING = {"microbatch_tokens": 128}
"""Room for a prompt before each sequence of the batches; with it, `prefix_sharing` has work."""
LONGER = {"policy": {"max_context": 128}}
LEVELS = {
    "microbatch_tokens": 1400,
    "prefix_sharing": True,
    "packing": True,
    "activation_checkpointing": True,
}
"""With prompts so long that what follows them is another level of the tree."""
LONG_PROMPT = ROW_CAPACITY + 20
LONGEST = {"policy": {"max_context": 2 * ROW_CAPACITY}}
SEVERAL = {"updates_per_batch": 2, "epochs": 2}
CORRECTED: dict[str, Any] = {
    "loss": {
        "type": "grpo",
        "correction": "token_truncate",
        "top_entropy_quantile": 0.5,
    }
}
BOUNDED: dict[str, Any] = {
    "sdpo": {**SECTIONS["sdpo"], "min_update_share": 0.3},
    "replay": {**SECTIONS["replay"], "max_update_share": 0.2},
}
ADAPTED = {"lora": {"rank": 2, "targets": ["q_proj", "up_proj"]}}


def config(trainer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    """A small run with all channels; microbatches hold two or three of its sequences."""
    sections["trainer"] = trainer or {}
    return Config.model_validate(
        {name: {**SECTIONS[name], **sections.get(name, {})} for name in SECTIONS}
    )


def write_policy(folder: Path) -> Any:
    """The initial policy, with weights that are wide enough for sharp predictions; returns it."""
    tokenizer = build_tokenizer([" ".join(dir(torch))] * 2, 400)
    assert len(tokenizer) >= 300, "batches have ids below 300"
    model = build_model(config().policy, tokenizer, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(std=0.3, generator=generator)
    save_policy(model.eval(), tokenizer, folder)
    return model


def batches(model: Any) -> list[StepBatch]:
    """Five steps of uneven lengths. Of the last two, one rank has no views, then nothing at all.

    In the first step one pair exceeds a microbatch, so that one rank has none such; in the second
    all do.
    """
    rng = random.Random(0)
    sizes = [(7, 3), (6, 5), (9, 1), (2, 4), (1, 1)]
    found = [batch_of(model, rng, samples=n, pairs=pairs) for n, pairs in sizes]
    found[0] = replace(found[0], pairs=[large(model, found[0].pairs[0]), *found[0].pairs[1:]])
    found[1] = replace(found[1], pairs=[large(model, pair) for pair in found[1].pairs])
    return [
        replace(
            batch,
            step=step,
            samples=[replace(one, group_id=at // 2) for at, one in enumerate(batch.samples)],
            pairs=[untied(pair) for pair in batch.pairs],
        )
        for step, batch in enumerate(found)
    ]


def large(model: Any, pair: PairSample) -> PairSample:
    """The pair with a context of which a microbatch holds one side at a time."""
    context = (pair.context_ids * LARGE)[:LARGE]
    longer = replace(pair, context_ids=context, reference=None)
    (scores,) = score_pairs(LanguageModel(model), [longer], 10 * LARGE)
    return replace(longer, reference=scores)


def with_prompts(steps: Sequence[StepBatch], length: int = 30) -> list[StepBatch]:
    """The steps with one of two prompts before each sequence."""
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(length)] for _ in range(2)]
    return [begun_with(step, *prompts) for step in steps]


def untied(pair: PairSample) -> PairSample:
    """The pair with a reference that prefers no answer as the model does: no rounding decides."""
    assert pair.reference is not None
    return replace(pair, reference=(pair.reference[0] - 1, pair.reference[1]))


def train(learner: Learner, steps: Sequence[StepBatch]) -> list[Metrics]:
    """Train steps with the learner's own teacher."""
    return [
        learner.train(batch, learner.own_teacher_outputs(batch) if batch.views else None)
        for batch in steps
    ]


def gathered(tensors: Mapping[str, Tensor]) -> Weights:
    """Whole tensors. All ranks together."""
    wholes = {n: one.full_tensor() if is_dtensor(one) else one for n, one in tensors.items()}
    return {name: whole.detach() for name, whole in wholes.items()}


def weights_of(learner: Learner) -> Weights:
    """The policy's whole tensors. All ranks together."""
    return {name: one.clone() for name, one in gathered(learner.export()).items()}


class Watching:
    """A teacher that looks, in the middle of a step, at what a publisher would copy."""

    def __init__(self, learner: Learner, batch: StepBatch) -> None:
        self._source, self._learner = learner.own_teacher_outputs(batch), learner
        self._before = self._copied()
        self.unmoved: list[bool] = []

    def take(self, *asked: Any) -> Any:
        now = self._copied()
        self.unmoved.append(all(torch.equal(now[name], one) for name, one in self._before.items()))
        return self._source.take(*asked)

    def skip(self, microbatch: int) -> None:
        self._source.skip(microbatch)

    def _copied(self) -> Weights:
        return {name: local(one).clone() for name, one in self._learner.export().items()}


def five_steps(settings: Config, folder: Path, ranks: Ranks, steps: Sequence[StepBatch]) -> Any:
    """Metrics of all steps, the gradients of the first, and the weights after the last."""
    learner = Learner(settings, folder, ranks)
    gradients: Weights = {}

    def note() -> None:
        named = learner.model.named_parameters()
        found = gathered({n: one.grad for n, one in named if one.grad is not None})
        gradients.update({name: one.clone() for name, one in found.items()})

    watching = Watching(learner, steps[0])
    first = learner.train(steps[0], watching, note)
    return {
        "unmoved": watching.unmoved,
        "gradients": gradients,
        "metrics": [first, *train(learner, steps[1:])],
        "last": weights_of(learner),
    }


class Losing:
    """A teacher whose signals are lost on one rank from its second microbatch on."""

    def __init__(self, source: Any, here: bool) -> None:
        self._source, self._here, self._taken = source, here, 0

    def take(self, microbatch: int, *rest: Any) -> Any:
        self._taken += 1
        found = self._source.take(microbatch, *rest)
        if self._here and self._taken > 1:
            raise TeacherOutputsLost("the teacher is gone")
        return found

    def skip(self, microbatch: int) -> None:
        self._source.skip(microbatch)


def lost(settings: Config, folder: Path, ranks: Ranks, batch: StepBatch, at: int) -> Any:
    """A step that loses its signals on rank `at`, and another after it that does not."""
    learner = Learner(settings, folder, ranks)
    losing = Losing(learner.own_teacher_outputs(batch), ranks.rank == at)
    metrics = [learner.train(batch, losing), *train(learner, [replace(batch, step=1)])]
    return {"metrics": metrics, "last": weights_of(learner)}


def gone_on(
    settings: Config, folder: Path, ranks: Ranks, steps: Sequence[StepBatch], checkpoint: Path
) -> Any:
    """Metrics of steps from a checkpoint, and the weights after them."""
    learner = Learner(settings, folder, ranks)
    learner.restore(checkpoint)
    return {"metrics": train(learner, steps), "last": weights_of(learner)}


def saved(
    settings: Config, folder: Path, ranks: Ranks, steps: Sequence[StepBatch], checkpoint: Path
) -> Any:
    """Save after two steps and go on; the weights then and after the rest."""
    learner = Learner(settings, folder, ranks)
    train(learner, steps[:2])
    save(learner, ranks, checkpoint)
    found = {"saved": weights_of(learner)}
    metrics = train(learner, steps[2:])
    return found | {"metrics": metrics, "last": weights_of(learner)}


def half(folder: Path, ranks: Ranks, steps: Sequence[StepBatch]) -> Any:
    """What bfloat16 computes: dtypes, and losses of the same pairs again and again."""
    settings = config({**SHARDED, "compute_dtype": "bfloat16", "activation_checkpointing": True})
    learner = Learner(settings, folder, ranks)
    pairs = replace(steps[1], samples=[], views=[])
    metrics = [learner.train(replace(pairs, step=step), None) for step in range(4)]
    with torch.no_grad():
        hidden = LanguageModel(learner.model).hidden([[1, 2, 3], [4]])
    return {
        "metrics": metrics,
        "computes": str(hidden.computed.dtype),
        "keeps": {str(one.dtype) for one in learner.export().values()},
    }


def both(
    rank: int, rendezvous: Path, folder: Path, steps: list[StepBatch], root: Path, adapters: bool
) -> None:
    """What each of two processes does, in the same order; the results lie in `root` then."""
    torch.set_num_threads(1)
    ranks = Ranks.connect(rank, 2, rendezvous, 60.0)
    sharded, adapted = config(SHARDED), config(SHARDED | ADAPTED)
    found = {
        "five": five_steps(sharded, folder, ranks, steps),
        "sharing": five_steps(
            config({**SHARING, "ranks": 2, "prefix_sharing": True}, **LONGER),
            folder,
            ranks,
            with_prompts(steps),
        ),
        "updates": five_steps(config(SHARDED | SEVERAL, **CORRECTED), folder, ranks, steps),
        "bounded": five_steps(config(SHARDED, **BOUNDED), folder, ranks, steps),
        "lost": lost(sharded, folder, ranks, steps[0], at=1),
        "lost bounded": lost(config(SHARDED, **BOUNDED), folder, ranks, steps[0], at=1),
        "saved": saved(sharded, folder, ranks, steps, root / "checkpoints" / "of-two"),
        "from one": gone_on(sharded, folder, ranks, steps[2:], root / "checkpoints" / "of-one"),
        "from two": gone_on(sharded, folder, ranks, steps[2:], root / "checkpoints" / "of-two"),
        "half": half(folder, ranks, steps),
    }
    if adapters:
        found["levels"] = five_steps(
            config({"ranks": 2} | LEVELS | ADAPTED, **LONGEST),
            folder,
            ranks,
            with_prompts(steps, LONG_PROMPT),
        )
        found["adapted bounded"] = five_steps(
            config(SHARDED | ADAPTED, **BOUNDED), folder, ranks, steps
        )
        found["adapted"] = saved(adapted, folder, ranks, steps, root / "checkpoints" / "adapted")
    torch.save(found, root / f"rank-{rank}.pt")
