"""The teacher's weights by kind: each follows the trainer as its definition says.

What a teacher tells: each kind of signal against whole logits, and its way through bytes.
"""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import hinted
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_batches import batch_of, largest_change, nearby, weights_of
from torch import Tensor

from composer_mesh.actors.learning.sdpo_channel import StudentRows
from composer_mesh.actors.models.hidden_states import SelectedRows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.teacher_outputs.messages import (
    TeacherHead,
    make_teacher_output,
    pack,
    unpack,
    view_keys,
)
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel, blend_from, hinted_states
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.losses.blocks import default_block, rows_per_block
from composer_mesh.planning.model_refusals import CappedInterpolation
from composer_mesh.rollouts.alignment import HintedView

RATE = 0.3


KINDS = ["live", "ema", "frozen", "trust_region"]


def config(kind: str, **settings: Any) -> SdpoConfig:
    return SdpoConfig(alpha=0.5, teacher=kind, ema_rate=RATE, **settings)


def views_of(model: Any) -> list[HintedView]:
    return batch_of(model, random.Random(1), samples=4).views


def scores(states: Tensor, head: TeacherHead) -> Tensor:
    found = states @ head.weight.T
    return found if head.bias is None else found + head.bias


def whole(model: Any, views: list[HintedView]) -> Tensor:
    """Logits [N, V] at the teacher's rows, from the model's own whole forward of each view."""
    rows = []
    with torch.no_grad():
        for view in views:
            logits = model(input_ids=torch.tensor([view.teacher_ids])).logits[0]
            rows.append(logits[view.teacher_rows])
    return torch.cat(rows)


def said(teacher: TeacherModel, views: list[HintedView]) -> Tensor:
    return scores(teacher.states(views), teacher.head())


class Trainer:
    """A model that learns, and a teacher that follows it from outside or lives beside it."""

    def __init__(self, model: Any, kind: str, follows: bool, **settings: Any) -> None:
        self.model = model
        self.initial = copy.deepcopy(model)
        own = model if follows else copy.deepcopy(model)
        self.teacher = TeacherModel(own, config(kind, **settings), 4096, follows)

    def learn(self, version: int) -> None:
        nearby(self.model, seed=version)
        self.teacher.absorb(version, blend_from(self.model))


def expected(kind: str, trainer: Trainer, history: list[Any], views: list[HintedView]) -> Tensor:
    """Logits by the definition of each kind, from the trainer's weights so far."""
    if kind == "live":
        return whole(trainer.model, views)
    if kind == "frozen":
        return whole(trainer.initial, views)
    if kind == "trust_region":
        return torch.lerp(whole(trainer.initial, views), whole(trainer.model, views), RATE)
    average = copy.deepcopy(trainer.initial)
    with torch.no_grad():
        for weights in history:
            for name, value in average.named_parameters():
                value.copy_((1 - RATE) * value + RATE * weights[name])
    return whole(average, views)


@pytest.mark.parametrize("follows", [False, True], ids=["mesh", "inline"])
@pytest.mark.parametrize("kind", KINDS)
def test_before_and_after_each_version_a_teacher_says_what_its_definition_says(
    build_model: Any, kind: str, follows: bool
) -> None:
    trainer, history = Trainer(build_model(1), kind, follows), []
    views = views_of(trainer.model)
    for version in range(4):
        if version:
            trainer.learn(version)
            history.append(weights_of(trainer.model))
        assert trainer.teacher.version == version
        torch.testing.assert_close(
            said(trainer.teacher, views),
            expected(kind, trainer, history, views),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_never_changes_the_trainers_model_and_has_no_gradient(
    build_model: Any, kind: str
) -> None:
    trainer = Trainer(build_model(1), kind, follows=True)
    views = views_of(trainer.model)
    nearby(trainer.model, seed=9)
    before = weights_of(trainer.model)
    trainer.teacher.absorb(1, blend_from(trainer.model))
    found = trainer.teacher.teacher_output(views)
    assert not any(tensor.requires_grad for tensor in found.values())
    assert largest_change(before, weights_of(trainer.model)) == 0
    assert all(weights.requires_grad for weights in trainer.model.parameters())


def test_only_kinds_with_other_weights_than_the_trainers_copy_its_model(build_model: Any) -> None:
    model = build_model(1)
    for kind in KINDS:
        held = TeacherModel(model, config(kind), 512, follows=True).models
        assert [one is model for one in held] == {
            "live": [True],
            "ema": [False],
            "frozen": [False],
            "trust_region": [True, False],
        }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_made_once_for_a_version(build_model: Any, kind: str) -> None:
    trainer = Trainer(build_model(1), kind, follows=False)
    first = trainer.teacher.head()
    assert trainer.teacher.head() is first
    trainer.learn(1)
    assert trainer.teacher.head() is not first


@pytest.mark.parametrize("kind", ["live", "trust_region"])
def test_an_inline_teacher_has_the_head_of_the_weights_that_its_states_are_of(
    build_model: Any, kind: str
) -> None:
    """Several updates of one step move the trainer's weights within a version."""
    trainer = Trainer(build_model(1), kind, follows=True)
    views = views_of(trainer.model)
    said(trainer.teacher, views)
    nearby(trainer.model, seed=7)
    wanted = expected(kind, trainer, [], views)
    torch.testing.assert_close(said(trainer.teacher, views), wanted, rtol=1e-4, atol=1e-4)


def test_a_trust_region_of_capped_logits_is_refused(build_model: Any) -> None:
    model = build_model(1)
    model.config.final_logit_softcapping = 2.0
    TeacherModel(model, config("ema"), 4096)
    with pytest.raises(CappedInterpolation, match="Qwen3ForCausalLM caps its logits at 2 but sdpo"):
        TeacherModel(model, config("trust_region"), 4096)


@pytest.mark.parametrize("teacher_output", ["full", "topk", "sampled"])
def test_other_signals_of_a_trust_region_are_of_its_mixed_logits(
    build_model: Any, teacher_output: str
) -> None:
    trainer = Trainer(build_model(1), "trust_region", False, teacher_output=teacher_output, top_k=3)
    trainer.learn(1)
    views = views_of(trainer.model)
    mixed = expected("trust_region", trainer, [], views)
    found = trainer.teacher.teacher_output(views)
    targets = torch.tensor([target for view in views for target in view.targets])
    logprobs = mixed.log_softmax(-1)
    wanted = {
        "full": mixed,
        "topk": logprobs.topk(3).values,
        "sampled": logprobs.gather(-1, targets[:, None])[:, 0],
    }[teacher_output]
    name = "logits" if teacher_output == "full" else "logprobs"
    torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("budget", [40, 100, 4096])
def test_states_are_in_the_views_order_however_they_are_batched(
    build_model: Any, budget: int
) -> None:
    model = build_model(1)
    views = [view for view in views_of(model) if len(view.teacher_ids) <= 40][::-1]
    assert len(views) > 2
    states = hinted_states(model, views, budget)
    language = LanguageModel(model)
    found = scores(states, TeacherHead(language.weight, language.bias))
    torch.testing.assert_close(found, whole(model, views), rtol=1e-4, atol=1e-4)


ROWS, HIDDEN, VOCABULARY = 9, 6, 40


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8]


def states_and_head(bias: bool = True) -> tuple[Tensor, TeacherHead]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    own = torch.randn(VOCABULARY, generator=generator) if bias else None
    return states, TeacherHead(weight, own)


def teacher_output(
    states: Tensor, head: TeacherHead, choice: Tensor | None = None, **config: Any
) -> dict[str, Tensor]:
    targets = torch.arange(len(states)) % len(head.weight)
    return make_teacher_output(SdpoConfig(**config), states, head, targets, choice)


def test_hidden_is_the_states_themselves() -> None:
    states, head = states_and_head()
    found = teacher_output(states, head, teacher_output="hidden", temperature=2.0)
    assert found.keys() == {"states"}
    assert torch.equal(found["states"], states)


@pytest.mark.parametrize("bias", [True, False])
def test_full_is_all_logits_without_a_temperature(bias: bool) -> None:
    states, head = states_and_head(bias)
    found = teacher_output(states, head, teacher_output="full", temperature=2.0)
    torch.testing.assert_close(found["logits"], scores(states, head))
    assert found["logits"].dtype == torch.float32


def test_full_is_float32_also_for_a_teacher_of_halves() -> None:
    states, head = states_and_head(bias=False)
    halves, half_head = states.bfloat16(), TeacherHead(head.weight.bfloat16(), None)
    found = teacher_output(halves, half_head, teacher_output="full")["logits"]
    expected = halves.float() @ half_head.weight.float().T
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_is_the_tempered_log_prob_of_each_target(temperature: float) -> None:
    states, head = states_and_head()
    found = teacher_output(states, head, teacher_output="sampled", temperature=temperature)[
        "logprobs"
    ]
    logprobs = (scores(states, head) / temperature).log_softmax(-1)
    torch.testing.assert_close(found, logprobs.diagonal())


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("top_k", [1, 7, VOCABULARY])
def test_topk_is_the_teachers_most_likely_entries_normalized_over_the_whole_vocabulary(
    top_k: int, temperature: float
) -> None:
    states, head = states_and_head()
    found = teacher_output(
        states, head, teacher_output="topk", top_k=top_k, temperature=temperature
    )
    logprobs, ids = (scores(states, head) / temperature).log_softmax(-1).topk(top_k, dim=-1)
    assert torch.equal(found["ids"].long(), ids)
    torch.testing.assert_close(found["logprobs"], logprobs)


def test_a_top_k_beyond_the_vocabulary_holds_the_vocabulary() -> None:
    states, head = states_and_head()
    found = teacher_output(states, head, teacher_output="topk", top_k=10_000)
    assert found["ids"].shape == (ROWS, VOCABULARY)


def test_topk_of_the_students_choice_is_about_the_students_entries() -> None:
    states, head = states_and_head()
    choice = torch.randint(VOCABULARY, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    found = teacher_output(
        states,
        head,
        choice.int(),
        teacher_output="topk",
        top_k=5,
        top_k_choice="student",
        temperature=1.6,
    )
    logprobs = (scores(states, head) / 1.6).log_softmax(-1)
    assert torch.equal(found["ids"], choice.int())
    torch.testing.assert_close(found["logprobs"], logprobs.gather(-1, choice))


def test_the_student_chooses_its_own_most_likely_entries(build_model: Any) -> None:
    model = LanguageModel(build_model(1))
    hidden = model.hidden([[5, 7, 9, 11]]).computed.detach()
    rows = StudentRows(model, SelectedRows.all(hidden), torch.zeros(4, dtype=torch.long), 1.0)
    expected = (hidden @ model.weight.T).topk(3, dim=-1).indices
    assert torch.equal(rows.top_k(3).long(), expected)
    assert rows.top_k(3).dtype == torch.int32
    assert rows.top_k(10**6).shape == (4, len(model.weight))


def test_rows_in_many_blocks_tell_what_whole_logits_do() -> None:
    generator = torch.Generator().manual_seed(0)
    head = TeacherHead(torch.randn(50_000, 4, generator=generator), None)
    states = torch.randn(200, 4, generator=generator)
    assert rows_per_block(50_000, default_block(states)) < len(states) / 2
    logits = scores(states, head)
    torch.testing.assert_close(
        teacher_output(states, head, teacher_output="full")["logits"], logits
    )
    logprobs = logits.log_softmax(-1)
    found = teacher_output(states, head, teacher_output="topk", top_k=3)
    torch.testing.assert_close(found["logprobs"], logprobs.topk(3).values)
    found = teacher_output(
        states, head, found["ids"], teacher_output="topk", top_k=3, top_k_choice="student"
    )
    torch.testing.assert_close(found["logprobs"], logprobs.topk(3).values)
    found = teacher_output(states, head, teacher_output="sampled")
    torch.testing.assert_close(found["logprobs"], logprobs.diagonal())


TENSORS = st.dictionaries(
    st.text("abc", min_size=1, max_size=5),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=4,
)


@given(TENSORS, st.integers(0, 10_000))
def test_tensors_of_any_dtype_and_shape_come_out_of_the_bytes_as_they_went_in(
    kinds: dict[str, tuple[torch.dtype, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype)
        for name, (dtype, shape) in kinds.items()
    }
    layout, packed = pack(tensors)
    assert packed.dtype == torch.uint8
    assert packed.numel() % 8 == 0
    found = unpack(pickle.loads(pickle.dumps(layout)), packed.clone())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_is_not_contiguous_or_needs_a_gradient_is_packed_as_its_values() -> None:
    tensor = torch.arange(6.0).view(2, 3).T.requires_grad_()
    layout, packed = pack({"states": tensor})
    assert torch.equal(unpack(layout, packed)["states"], tensor.detach())
    assert not packed.requires_grad


def test_views_are_known_by_trace_and_turn() -> None:
    assert view_keys([hinted.view("a", 2), hinted.view("b")]) == (("a", 2), ("b", 0))
