"""An episode in the terminal: a person, a script or an expert acts, and all of it is plain text."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from composer_mesh.plugins.authoring.play import BadLine, action_of
from composer_mesh.rollouts.tool_calls import ToolCall, parse_action
from composer_mesh.services.cli import main

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
SOURCE = '''
import asyncio, time
from composer_mesh import Session, Task, ToolError, reward, tool

class Counting(Session):
    count = 0

    @tool
    async def add(self, by: int) -> str:
        """Adds to the count.\x1b[31m"""
        await asyncio.sleep(0)
        if by < 0:
            raise ToolError("negative", "by is negative", {"by": str(by)}, hint="negative")
        self.count += by
        return f"count {self.count}\\x1b[2J"

    @tool
    def fail(self) -> str:
        """Fails."""
        return {}["nothing"]

    @tool
    def hang(self) -> str:
        """Hangs."""
        time.sleep(3600)

class Count(Task):
    session_class = Counting
    hint_templates = {"negative": "Add no {by}."}

    def generate(self, rng):
        return {"goal": rng.randint(1, 10**6)}

    def prompt(self, row):
        return "Count to three.\\x1b[5m"

    @reward
    def three(self, transcript):
        return float(transcript.session.count == 3)
'''


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "count.py").write_text(SOURCE)
    return f"{tmp_path / 'count.py'}:Count"


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_expert_plays_an_episode_to_its_reward(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--episode", "3", "--split", "heldout", "--scripted", "expert"]
    assert main(["play", QUICKSTART, *words]) == 0
    out = capsys.readouterr().out
    assert "task toolbox, heldout episode 3, at most 6 turns" in out
    assert "calculator(op, a, b)  Computes a op b." in out
    assert "reward 1, success\n  solved: 1, weight 1" in out


def test_a_person_calls_tools_and_answers(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(
        monkeypatch, '/call add {"by": 1}', "", "/call add {", "/what", '/call add {"by": 2}', "3"
    )
    assert main(["play", task]) == 0
    out = capsys.readouterr().out
    assert "[tool] count 3" in out
    assert out.count("add(by=…) or /call NAME") == 3  # first, for an empty line and for /what
    assert "the arguments of add are not JSON" in out
    assert "/what is not a command" in out
    assert "the episode ended after 3 turns: reward 1, success\n  three: 1, weight 1" in out


def test_an_error_is_shown_with_its_facts_and_its_hint(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, '/call add {"by": -2}', "/state", "/quit")
    assert main(["play", task]) == 0
    out = capsys.readouterr().out
    assert "error negative (by: -2)\n  hint (negative): Add no -2." in out
    assert out.count("error: by is negative") == 2  # when it happened, and in the state
    assert "the episode was left unfinished after 1 turns: reward 0, no success" in out


def test_no_control_code_of_a_task_or_an_action_reaches_the_terminal(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, '/call add {"by": 1}', "//\x1b[41m")
    assert main(["play", task]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "count 1\\x1b[2J" in out
    assert "[assistant] /\\x1b[41m" in out


def test_a_script_acts_line_by_line_and_ends_where_it_ends(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.txt"
    script.write_text('/call add {"by": 3}\n\n')
    assert main(["play", task, "--scripted", str(script)]) == 0
    assert "left unfinished after 1 turns: reward 1, success" in capsys.readouterr().out
    script.write_text('/call add {"by": 3}\n\n/call add [1]\n')
    assert main(["play", task, "--scripted", str(script)]) == 2
    assert "script.txt, line 3: the arguments of add are a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--scripted", "expert"], "task 'count' has none"),
        (["--scripted", "nowhere.txt"], "--scripted nowhere.txt cannot be read"),
        (["--episode", "-1"], "--episode is -1 but counts from 0"),
        (["--set", "environment.max_turns=0"], "must be at least 1"),
    ],
)
def test_what_cannot_be_played_is_refused(
    task: str, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", task, *words]) == 2
    assert why in capsys.readouterr().err


def test_an_error_of_the_task_names_its_line(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "/call fail {}")
    assert main(["play", task]) == 2
    line = SOURCE.splitlines().index('        return {}["nothing"]') + 1
    assert f"count.py:{line}: KeyError: 'nothing'" in capsys.readouterr().err


def test_a_tool_that_never_returns_is_an_error_after_its_limit(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "/call hang {}", "/quit")
    assert main(["play", task, "--set", "environment.call_s=5.0"]) == 0
    assert "error tool_timeout (tool: hang)" in capsys.readouterr().out


ADD = {"add": ["by", "why"]}


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("add(by=2)", {"by": 2}),
        (' add ( by = -2, why="a, (b)" ) ', {"by": -2, "why": "a, (b)"}),
        ("add(2, why=null)", {"by": 2, "why": None}),
        ('add(by=[1, {"a": true}])', None),
        ("add(by=(1, 2), why={'a': None})", {"by": [1, 2], "why": {"a": None}}),
        ("add()", {}),
    ],
)
def test_a_call_is_written_as_in_python(line: str, arguments: dict[str, object] | None) -> None:
    if arguments is None:
        with pytest.raises(BadLine, match="is not a literal value"):
            action_of(line, ADD)
    else:
        call = parse_action(action_of(line, ADD))
        assert isinstance(call, ToolCall)
        assert (call.name, call.arguments) == ("add", arguments)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("add(by=open('x'))", "open('x') is not a literal value"),
        ("add(by=__import__('os').system('true'))", "is not a literal value"),
        ("add(1, 2, 3)", "it has 3 values for 2 parameters"),
        ("add(1, by=2)", "by has two values"),
        ("add(**{'by': 1})", "it is not a call of one tool"),
        ("add(by=1) + add(by=2)", "it is not a call of one tool"),
        ("add(by=)", "write add(by=VALUE, why=VALUE)"),
        ("add(by=1e999)", "not JSON compliant"),
        ("add(by={1})", "not JSON serializable"),
    ],
)
def test_a_call_that_is_none_is_refused_and_never_run(line: str, why: str) -> None:
    with pytest.raises(BadLine) as refused:
        action_of(line, ADD)
    assert why in str(refused.value)


@pytest.mark.parametrize("line", ["print(1)", "add (is) what I did", "f(x=1)", "the add(by=1)"])
def test_a_line_that_calls_no_tool_is_an_answer(line: str) -> None:
    assert action_of(line, ADD) == line


@given(
    st.one_of(
        st.text(),
        st.text().map("/call add {}".__add__),
        st.text().map("/".__add__),
        st.text().map("add({})".format),
    )
)
def test_any_line_is_an_action_or_is_refused_in_printable_words(line: str) -> None:
    try:
        action, refusal = action_of(line, ADD), ""
    except BadLine as bad:
        action, refusal = None, str(bad)
    assert refusal.isprintable()
    called = line.startswith(("/call", "add("))
    if action is not None and called and action != line:
        assert isinstance(parse_action(action), ToolCall)
    elif action is not None:
        assert action in (line, line[1:])
