"""A step that computes shared prefixes once: the losses and weights of the dense one.

Where adapters are trained, the initial policy is the trained model without them, not a copy.

What a step may be asked for is the same where the weights are sharded, here over one rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repetition import LONG
from step_batches import (
    ALL_ON,
    NARROW,
    Make,
    batch_of,
    begun_with,
    largest_change,
    taught,
    weights_of,
)

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.lora import BaseModel
from composer_mesh.actors.models.policy import build_model as build_other
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.trained_model import frozen_model, trained_model
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel, hinted_states
from composer_mesh.configs.trainer import Sharing
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import sizes_of
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


LORA = {"lora": {"rank": 2, "alpha": 4.0}, "lr": 1e-2}


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def config_of(build_config: Any, teacher: str, **trainer: Any) -> Any:
    sdpo = {**ALL_ON.get("sdpo", {}), "teacher": teacher, "placement": "inline"}
    return build_config(
        **{**NARROW, **ALL_ON, "sdpo": sdpo},
        loss={"type": "grpo", "kl_beta": 0.1},
        trainer={**LORA, **trainer},
    )


def known(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("teacher", ["frozen", "trust_region"])
def test_steps_are_those_of_a_reference_and_a_teacher_with_weights_of_their_own(
    build_config: Any, folder: Path, rng: random.Random, teacher: str, sharing: bool
) -> None:
    pytest.importorskip("peft", exc_type=ModuleNotFoundError)
    config = config_of(build_config, teacher, prefix_sharing=sharing)
    learner, ranks = Learner(config, folder, Ranks()), Ranks()
    model = trained_model(config, folder, ranks)
    step = OptimizerStep(model, frozen_model(config, folder, ranks), config, ranks)
    copied = TeacherModel(
        model,
        config.sdpo,
        config.trainer.microbatch_tokens,
        follows=True,
        copied=lambda _: frozen_model(config, folder, ranks),
        sharing=config.trainer.sharing,
    )
    for version in range(3):
        batch = replace(batch_of(model, rng), step=version)
        source = InlineSource(copied, config.sdpo, version, step.teacher_forwards(batch))
        expected = step.run(batch, source)
        copied.absorb(version + 1, lambda *_: None)
        found = learner.train(batch, learner.own_teacher_outputs(batch))
        assert known(found) == pytest.approx(known(expected), rel=1e-4, abs=1e-6)
    assert found["policy/kl_reference"] > 0
    assert largest_change(weights_of(learner.model), weights_of(model)) < 1e-6
    assert learner._teacher is not None
    assert learner._teacher.models[-1] is learner.model
    assert isinstance(learner.step._policy._reference, BaseModel)


def test_no_copy_of_the_initial_policy_is_counted_where_adapters_are_trained(
    build_config: Any,
) -> None:
    def copies(config: Any) -> int:
        parts = memory_of("trainer", config, sizes_of(config.policy)).host
        return sum(part.bytes for part in parts if part.what == "frozen copies")

    whole = config_of(build_config, "frozen", lora=None)
    one = copies(whole) // 2
    assert one > 0
    assert copies(config_of(build_config, "frozen")) == 0
    assert copies(config_of(build_config, "ema")) == one
    assert copies(config_of(build_config, "frozen", sharding="fsdp2")) == 2 * one


NEEDS = ["entropies", "logits", "hidden_states"]


USERS_MODULE = """
from composer_mesh import LossInputs, LossOutputs, loss_needs


@loss_needs("entropies", "logits", "hidden_states")
def loss(inputs: LossInputs) -> LossOutputs:
    gain = (inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
    more = inputs.logits.logsumexp(-1).square().sum() + inputs.hidden_states.square().sum()
    return LossOutputs(loss=0.01 * more - 0.2 * inputs.entropies.sum() - gain)
"""


@pytest.mark.parametrize("padding", [-3, 5])
def test_a_step_with_another_model_as_teacher_and_a_loss_on_logits_is_the_same_sharded(
    build_config: Any,
    build_model: Any,
    tokenizer: Any,
    write_module: Callable[[str, str], None],
    ranks: Ranks,
    tmp_path: Path,
    padding: int,
) -> None:
    write_module("users_sharded", USERS_MODULE)
    student = build_model(1)
    save_policy(student, tokenizer, tmp_path / "policy")
    sizes = build_config(policy={"hidden_size": 48, "heads": 3, "kv_heads": 3}).policy
    teacher = build_other(sizes, tokenizer, seed=5)
    teacher.resize_token_embeddings(len(student.lm_head.weight) + padding)
    save_policy(teacher, tokenizer, tmp_path / "teacher")
    other = {"teacher": "model", "teacher_model": {"path": tmp_path / "teacher"}}

    def trained(sharding: str) -> list[dict[str, Any]]:
        learner = Learner(
            build_config(
                trainer={"lr": 1e-2, "sharding": sharding, "microbatch_tokens": 512},
                loss={"type": "custom", "import_path": "users_sharded.loss", "needs": NEEDS},
                sdpo={"alpha": 0.5, "placement": "inline", **other},
            ),
            tmp_path / "policy",
            ranks,
        )
        rng = random.Random(1)
        batches = [replace(batch_of(student, rng, samples=6), step=step) for step in range(2)]
        return [learner.train(one, learner.own_teacher_outputs(one)) for one in batches]

    for whole, sharded in zip(trained("none"), trained("fsdp2"), strict=True):
        for name in ("loss/policy", "loss/sdpo", "policy/grad_norm"):
            assert sharded[name] == pytest.approx(whole[name], rel=1e-5)
            assert whole[name] != 0
