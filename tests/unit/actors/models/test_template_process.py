"""A stranger's chat template runs in a process that ends when it takes too much.

Two tokenizers are the same where ids of one mean the same to the other, and only there.

The tokenizer that skips transformers' wrapper gives the same ids and texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from repetition import LONG
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import Split

from composer_mesh.actors.models.policy import CHAT_TEMPLATE, build_tokenizer, save_policy
from composer_mesh.actors.models.template_process import (
    BoundedTokenizer,
    TemplateLimits,
    TemplateProcess,
)
from composer_mesh.actors.models.tokenizer import BackendTokenizer, difference
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.checks.accepting import check_policy_files, check_policy_template

SHORT = TemplateLimits(render_cpu_s=1)


ENDLESS = "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


# One operation, which no signal interrupts.
POWER = "{% set n = 8 + messages | length %}{{ n ** (n ** n) }}"


WHEN = "{{% if messages[-1].content == '{0}' %}}{1}{{% endif %}}"


HOSTILE = CHAT_TEMPLATE + "".join(
    WHEN.format(*case)
    for case in {
        "refuse": "{{ raise_exception('not so') }}",
        "memory": "{{ ('a' * 100000000000) | length }}",
        "nested": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "zero": "{{ 1 // 0 }}",
        "long": "{{ 'a' * 5000000 }}",
        "print": "{{ ''.__class__.__mro__ }}",
        "date": "{{ strftime_now('%d %b %Y %H:%M') }}",
    }.items()
)


def folder_with(template: str, tokenizer: Any, build_model: Any, folder: Path) -> Path:
    changed = deepcopy(tokenizer)
    changed.chat_template = template
    save_policy(build_model(1), changed, folder)
    return folder


@pytest.fixture(scope="module")
def hostile(
    tokenizer: Any, build_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TemplateProcess]:
    folder = folder_with(HOSTILE, tokenizer, build_model, tmp_path_factory.mktemp("hostile"))
    with closing(TemplateProcess(folder)) as templates:
        yield templates


def asked(content: str) -> tuple[list[Message], dict[str, Any]]:
    return [{"role": "user", "content": content}], {"tokenize": False}


@LONG
def test_templates_render_as_in_this_process_and_their_errors_arrive(
    tokenizer: Any, toolbox: Any, hostile: TemplateProcess
) -> None:
    messages: list[Message] = [{"role": "user", "content": "q"}]
    own = ChatFormat(tokenizer, toolbox.tools)
    apart = ChatFormat(BoundedTokenizer(tokenizer, hostile), toolbox.tools)
    facts = hostile.check(toolbox.tools, hints=True, chat=PolicyConfig().chat)
    assert facts.chat == own.described
    assert apart.first_prompt(messages) == own.first_prompt(messages)
    assert apart.continuation(messages, []) == own.continuation(messages, [])
    assert apart.hint("h") == own.hint("h")
    for content in ("refuse", "print"):
        with pytest.raises(TemplateError, match=r"not so|__class__"):
            hostile.render(*asked(content))
    for content in ("memory", "nested", "zero", "long"):
        told = r"MemoryError|RecursionError|ZeroDivisionError|writes more than"
        with pytest.raises(ChatTemplateError, match=told):
            hostile.render(*asked(content))
    assert hostile.render(*asked("q")).endswith("q<|im_end|>\n")


def test_the_pinned_date_reaches_the_process(tokenizer: Any, hostile: TemplateProcess) -> None:
    same = deepcopy(tokenizer)
    same.chat_template = HOSTILE
    pinned = BoundedTokenizer(same, hostile)
    chat = ChatFormat(pinned, [], date="2001-01-31")
    assert "31 Jan 2001 00:00" in chat.raw_text(chat.first_prompt(asked("date")[0]))
    unpinned = ChatFormat(pinned, [])
    assert "2001" not in unpinned.raw_text(unpinned.first_prompt(asked("date")[0]))


@LONG
def test_contents_of_any_length_are_rendered_from_several_threads(
    hostile: TemplateProcess,
) -> None:
    texts = ["ä" * 9_000_000, *(str(one) for one in range(20))]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: hostile.render(*asked(text)), texts))
    assert [one.partition("user\n")[2] for one in found] == [f"{one}<|im_end|>\n" for one in texts]


@LONG
@pytest.mark.parametrize("template", [ENDLESS, POWER], ids=["endless", "power"])
def test_a_folder_whose_template_has_no_end_is_refused_and_its_process_ends(
    template: str, tokenizer: Any, build_model: Any, toolbox: Any, tmp_path: Path
) -> None:
    folder = folder_with(template + CHAT_TEMPLATE, tokenizer, build_model, tmp_path / "endless")
    told = r"endless has a .*exceeds its limits of 1 s .*SIGXCPU\): use a tokenizer"
    with closing(TemplateProcess(folder, SHORT)) as templates:
        with pytest.raises(UnfitModelFolder, match=told):
            templates.check(toolbox.tools, hints=False, chat=PolicyConfig().chat)
        with pytest.raises(ChatTemplateError, match="has ended"):
            templates.render(*asked("q"))


def test_a_pattern_that_backtracks_is_an_error_of_the_model_and_not_a_panic(
    tokenizer: Any, hostile: TemplateProcess
) -> None:
    changed = deepcopy(tokenizer)
    changed.backend_tokenizer.pre_tokenizer = Split(Regex(r"(x+x+)+y"), "isolated")
    bounded = BoundedTokenizer(changed, hostile)
    with pytest.raises(ChatTemplateError, match=r"fails on a text \(.*retry-limit-in-match"):
        bounded.encode("x" * 40)
    with pytest.raises(ValueError, match="text input must be"):
        bounded.encode(7)  # type: ignore[arg-type]


def test_the_process_gets_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with closing(TemplateProcess(tmp_path)) as templates:
        environment = Path(f"/proc/{templates._program._process.pid}/environ").read_bytes()
    assert b"sk-secret" not in environment


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
