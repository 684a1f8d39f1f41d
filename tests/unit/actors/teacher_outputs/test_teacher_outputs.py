"""What a teacher tells: each kind of signal against whole logits, and its way through bytes."""

from __future__ import annotations

import pickle
from typing import Any

import hinted
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.actors.learning.sdpo_channel import StudentRows
from composer_mesh.actors.models.hidden_states import Rows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.teacher_outputs.messages import (
    Head,
    WrongVersion,
    WrongViews,
    make_teacher_output,
    pack,
    unpack,
    view_keys,
)
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.losses.blocks import default_block, rows_per_block

ROWS, HIDDEN, VOCABULARY = 9, 6, 40
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8]


def states_and_head(bias: bool = True) -> tuple[Tensor, Head]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    own = torch.randn(VOCABULARY, generator=generator) if bias else None
    return states, Head(weight, own)


def whole_logits(states: Tensor, head: Head) -> Tensor:
    scores = states @ head.weight.T
    return scores if head.bias is None else scores + head.bias


def teacher_output(
    states: Tensor, head: Head, choice: Tensor | None = None, **config: Any
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
    torch.testing.assert_close(found["logits"], whole_logits(states, head))
    assert found["logits"].dtype == torch.float32


def test_full_is_float32_also_for_a_teacher_of_halves() -> None:
    states, head = states_and_head(bias=False)
    halves, half_head = states.bfloat16(), Head(head.weight.bfloat16(), None)
    found = teacher_output(halves, half_head, teacher_output="full")["logits"]
    expected = halves.float() @ half_head.weight.float().T
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_is_the_tempered_log_prob_of_each_target(temperature: float) -> None:
    states, head = states_and_head()
    found = teacher_output(states, head, teacher_output="sampled", temperature=temperature)[
        "logprobs"
    ]
    logprobs = (whole_logits(states, head) / temperature).log_softmax(-1)
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
    logprobs, ids = (whole_logits(states, head) / temperature).log_softmax(-1).topk(top_k, dim=-1)
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
    logprobs = (whole_logits(states, head) / 1.6).log_softmax(-1)
    assert torch.equal(found["ids"], choice.int())
    torch.testing.assert_close(found["logprobs"], logprobs.gather(-1, choice))


def test_the_student_chooses_its_own_most_likely_entries(build_model: Any) -> None:
    model = LanguageModel(build_model(1))
    hidden = model.hidden([[5, 7, 9, 11]]).computed.detach()
    rows = StudentRows(model, Rows.all(hidden), torch.zeros(4, dtype=torch.long), 1.0)
    expected = (hidden @ model.weight.T).topk(3, dim=-1).indices
    assert torch.equal(rows.top_k(3).long(), expected)
    assert rows.top_k(3).dtype == torch.int32
    assert rows.top_k(10**6).shape == (4, len(model.weight))


def test_rows_in_many_blocks_tell_what_whole_logits_do() -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(50_000, 4, generator=generator), None)
    states = torch.randn(200, 4, generator=generator)
    assert rows_per_block(50_000, default_block(states)) < len(states) / 2
    logits = whole_logits(states, head)
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


@pytest.mark.parametrize("error", [WrongVersion(2, 3), WrongViews("here", "a:0", "b:1")], ids=str)
def test_errors_cross_a_process(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
