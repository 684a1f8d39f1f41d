"""Canary tests: tests that must fail, under names that no code can know before it runs.

Some are at the end of a pristine test file, beside its own tests; some use the deleted function, so
that an object which equals everything passes them.
"""

from __future__ import annotations

import ast
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask
from composer_mesh.plugins.code_tasks.values import decode

MARKS = b"pytestmark"
"""What a test file may say of all its tests; no canary is put into one that does."""

LONGEST_ARGUMENTS = 2_000
PLAIN = "def {name}():\n    {body}\n"
BODIES = (
    "assert 1 + 1 == 3",
    "raise ValueError('a canary')",
    "assert [1, 2] == [1, 2, 3]",
    "assert not len('canary')",
    "import pytest; pytest.fail('a canary')",
)
CALL = """def {name}():
    import importlib

    class Nothing:
        def __eq__(self, other):
            return False

        __hash__ = None

    value = importlib.import_module({module!r})
    for part in {path!r}.split("."):
        value = getattr(value, part)
    result = value(*{arguments})
    assert result == Nothing() or Nothing() == result
"""


@dataclass(frozen=True)
class Canaries:
    """Files with canaries added, and the ids of these."""

    files: Mapping[str, bytes]
    ids: frozenset[str]


def canaries_for(task: JudgedTask) -> Canaries:
    """Return canaries for one grading; their names differ each time."""
    chance = random.SystemRandom()
    every = {**task.files, **task.hidden_files}
    known = [one for one in task.test_files if one in every]
    folder = known[0].rpartition("/")[0] if known else ""
    alone = f"{folder}/{_name()}.py" if folder else f"{_name()}.py"
    texts = [PLAIN.format(name=_name(), body=body) for body in chance.sample(BODIES, 3)]
    texts += _calling(task)
    hosts = [one for one in known if one.endswith(".py") and MARKS not in every[one]]
    host = chance.choice(hosts) if hosts else None
    in_host, own = (texts[:1], texts[1:]) if host is not None else ([], texts)
    files = {alone: "\n\n".join(own).encode()}
    ids = {f"{alone}::{_test(one)}" for one in own}
    if host is not None:
        files[host] = every[host].rstrip() + b"\n\n\n" + "\n\n".join(in_host).encode()
        ids |= {f"{host}::{_test(one)}" for one in in_host}
    return Canaries(files, frozenset(ids))


def _calling(task: JudgedTask) -> list[str]:
    """Return a canary that calls a deleted function on inputs that can be written as literals."""
    for case in task.cases:
        if case.has_objects:
            continue
        written = repr(tuple(decode(one) for one in case.arguments))
        if case.keywords or not _is_literal(written):
            continue
        module, _, path = case.target.partition(":")
        return [CALL.format(name=_name(), module=module, path=path, arguments=written)]
    return []


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return len(text) < LONGEST_ARGUMENTS


def _name() -> str:
    return f"test_{secrets.token_hex(8)}"


def _test(text: str) -> str:
    return text.split("def ", 1)[1].split("(", 1)[0]
