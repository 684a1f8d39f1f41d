"""Two tokenizers are the same where ids of one mean the same to the other, and only there.

The tokenizer that skips transformers' wrapper gives the same ids and texts.
"""

from __future__ import annotations

from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repetition import LONG
from tokenizers import normalizers, pre_tokenizers

from composer_mesh.actors.models.policy import build_tokenizer, save_policy
from composer_mesh.actors.models.template_process import TemplateProcess
from composer_mesh.actors.models.tokenizer import BackendTokenizer, difference
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.services.checks.accepting import check_policy_files, check_policy_template


def test_a_copy_with_another_chat_template_is_the_same(tokenizer: Any) -> None:
    changed = deepcopy(tokenizer)
    changed.chat_template = "{{ messages }}"
    assert difference(tokenizer, changed) == ""


def test_a_tokenizer_of_other_words_has_other_ids(tokenizer: Any, corpus: list[str]) -> None:
    other = build_tokenizer([text[::-1] for text in corpus], 400)
    assert "of them different: " in difference(tokenizer, other)


def test_ids_that_are_swapped_are_told(tokenizer: Any) -> None:
    other = deepcopy(tokenizer)
    other.add_tokens(["<one>", "<two>"])
    own = deepcopy(tokenizer)
    own.add_tokens(["<two>", "<one>"])
    size = len(tokenizer)
    told = difference(own, other)
    assert f"2 of them different: '<one>' is id {size} there and id {size + 1} here" in told


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_other_special_ids_are_told(tokenizer: Any, name: str) -> None:
    other = deepcopy(tokenizer)
    setattr(other, f"{name}_token", "<|endoftext|>")
    number = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert f"has {name}_token_id {number}, and the policy's has" in difference(tokenizer, other)


def test_an_id_that_only_one_of_them_calls_special_is_told(tokenizer: Any) -> None:
    other = deepcopy(tokenizer)
    other.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    number = tokenizer.convert_tokens_to_ids("<tool_call>")
    told = f"says that id {number} is special, which it is not for the policy's"
    assert told in difference(tokenizer, other)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_equal_tokens_that_are_cut_in_another_way_are_told(tokenizer: Any, part: str) -> None:
    other = deepcopy(tokenizer)
    changed: Any = {
        "normalizer": normalizers.NFKC(),
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
    }[part]
    setattr(other.backend_tokenizer, part, changed)
    assert difference(tokenizer, other).startswith("encodes ")


@LONG
def test_a_folder_is_compared_within_limits_before_a_run(
    tokenizer: Any, build_model: Any, build_config: Any, toolbox: Any, tmp_path: Path
) -> None:
    save_policy(build_model(1), tokenizer, tmp_path / "policy")
    changed = deepcopy(tokenizer)
    changed.add_tokens(["<other>"])
    wider = build_model(1)
    wider.resize_token_embeddings(len(changed))
    save_policy(wider, changed, tmp_path / "teacher")
    with closing(TemplateProcess(tmp_path / "teacher")) as templates:
        templates.check_teacher_of(None)
        templates.check_teacher_of(tmp_path / "teacher")
    other = {"path": tmp_path / "teacher"}
    sdpo = {"alpha": 0.1, "teacher": "model", "teacher_model": other}
    config = build_config(policy={"path": tmp_path / "policy"}, sdpo=sdpo)
    check_policy_files(config)
    with pytest.raises(UnfitModelFolder, match=r"^sdpo.teacher_model.path: .*'<other>' is id"):
        check_policy_template(config, toolbox.tools)
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(UnfitModelFolder, match=r"^sdpo.teacher_model.path: .* is missing"):
        check_policy_files(config)


TOKENIZER = build_tokenizer(["a tool returned the sum of 17 orders"] * 40, 300)


@given(st.text())
def test_texts_have_the_ids_and_ids_the_texts_of_transformers(text: str) -> None:
    fast = BackendTokenizer(TOKENIZER)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert fast.encode(text, add_special_tokens=False) == ids
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert fast.decode(ids, **options) == TOKENIZER.decode(ids, **options)


def test_a_folder_that_asks_for_truncation_cuts_nothing_off() -> None:
    tokenizer = build_tokenizer(["a tool returned the sum"] * 40, 300)
    tokenizer.backend_tokenizer.enable_truncation(2)
    text = "a tool returned the sum of all orders"
    assert BackendTokenizer(tokenizer).encode(text, add_special_tokens=False) == tokenizer.encode(
        text, add_special_tokens=False
    )


def test_text_is_never_cleaned_up() -> None:
    with pytest.raises(ValueError, match="not cleaned up"):
        BackendTokenizer(TOKENIZER).decode([1], clean_up_tokenization_spaces=True)
