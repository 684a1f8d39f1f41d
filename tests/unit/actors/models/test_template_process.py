"""A stranger's chat template runs in a process that ends when it takes too much."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from repetition import LONG
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from composer_mesh.actors.models.policy import CHAT_TEMPLATE, save_policy
from composer_mesh.actors.models.template_process import (
    BoundedTokenizer,
    Limits,
    TemplateProcess,
)
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.traces import Message

SHORT = Limits(render_cpu_s=1)
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
        "endless": ENDLESS,
        "power": POWER,
    }.items()
)


def folder_with(template: str, tokenizer: Any, build_model: Any, folder: Path) -> Path:
    changed = deepcopy(tokenizer)
    changed.chat_template = template
    save_policy(build_model(1), changed, folder)
    return folder


@pytest.fixture
def hostile(tokenizer: Any, build_model: Any, tmp_path: Path) -> Iterator[TemplateProcess]:
    folder = folder_with(HOSTILE, tokenizer, build_model, tmp_path / "hostile")
    with closing(TemplateProcess(folder, SHORT)) as templates:
        yield templates


def asked(content: str) -> tuple[list[Message], dict[str, Any]]:
    return [{"role": "user", "content": content}], {"tokenize": False}


@LONG
def test_templates_render_as_in_this_process_and_their_errors_arrive_until_one_has_no_end(
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
    with pytest.raises(ChatTemplateError, match=r"exceeds its limits of 1 s .*SIGXCPU"):
        hostile.render(*asked("power"))
    with pytest.raises(ChatTemplateError, match="has ended"):
        hostile.render(*asked("q"))


def test_the_pinned_date_reaches_the_process(tokenizer: Any, hostile: TemplateProcess) -> None:
    pinned = BoundedTokenizer(tokenizer, hostile)
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
def test_a_folder_whose_template_has_no_end_is_refused(
    tokenizer: Any, build_model: Any, toolbox: Any, tmp_path: Path
) -> None:
    folder = folder_with(ENDLESS + CHAT_TEMPLATE, tokenizer, build_model, tmp_path / "endless")
    told = r"endless has a .*SIGXCPU\): use a tokenizer"
    templates = TemplateProcess(folder, SHORT)
    with closing(templates), pytest.raises(UnfitModelFolder, match=told):
        templates.check(toolbox.tools, hints=False, chat=PolicyConfig().chat)


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
