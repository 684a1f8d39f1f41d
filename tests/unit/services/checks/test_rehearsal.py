"""A dry episode is played in a process of its own, before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.services.checks import rehearsal
from composer_mesh.services.checks.rehearsal import refuse_unplayable, rehearse
from composer_mesh.tasks.errors import UnusableTask

TASK = """
import os
import re

from composer_mesh import Session, Task, reward, tool

class Tools(Session):
    @tool
    def look(self, key: str) -> str:
        \"\"\"Looks.\"\"\"
        return self.row["table"][key] if self.task.breaks == "tool" else key

    def start(self):
        if self.row["number"] in self.task.failing:
            raise KeyError("of the user")

    def close(self):
        if self.task.breaks == "close":
            self.file.close()

class Broken(Task):
    session_class = Tools

    def __init__(self, breaks: str = "", failing: list[int] = []) -> None:
        self.breaks, self.failing = breaks, failing

    def rows(self, split):
        return [{"question": f"{split} {n}?", "number": n, "table": {}} for n in range(9)]

    def prompt(self, row):
        return None if self.breaks == "prompt" else row["question"]

    def expert(self, messages):
        return "42"

    def gold(self, row):
        return [42] if self.breaks == "gold" else ["42"]

    @reward
    def right(self, transcript):
        print("scored")
        if self.breaks == "hold":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if self.breaks == "exit":
            os._exit(7)
        return {"reward": None, "text": "good"}.get(self.breaks, 1.0)
"""
Build = Callable[..., Config]


@pytest.fixture
def built(
    build_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Config]:
    (tmp_path / "broken.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)

    def build(hang_s: float = 30.0, **options: Any) -> Config:
        data = {"task": "broken.py:Broken", "options": options}
        supervision = {"hang_s": hang_s, "heartbeat_s": min(5.0, hang_s)}
        return build_config(data=data, supervision=supervision)

    return build


def test_a_sound_task_is_described_and_what_it_prints_is_seen(
    built: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rehearse(built())
    assert lines[0] == (
        "task 'broken': a dry episode by its expert took 1 turns, reward 1, a success"
    )
    assert "scored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("breaks", "line", "said"),
    [
        ("prompt", "def prompt", "the prompt of task 'broken' is 'None': return a text"),
        ("reward", "def right", "returned 'None' for train episode 0: return a finite number"),
        ("text", "def right", "returned 'good' for train episode 0"),
        ("tool", 'self.row["table"][key]', "tool 'look' of task 'broken' failed at"),
        ("close", "self.file.close()", "close of task 'broken' failed at"),
        ("gold", "def gold", "the gold actions of task 'broken' are"),
        ("exit", "", r"ended its process \(status 7\)"),
    ],
)
def test_what_a_task_does_wrong_is_refused_with_its_line(
    built: Any, breaks: str, line: str, said: str
) -> None:
    with pytest.raises(UnusableTask, match=said) as refused:
        rehearse(built(breaks=breaks))
    assert line in refused.value.frame
    assert str(refused.value).count("broken.py:") == bool(line)


def test_what_a_dry_episode_uses_is_not_called_the_task_s_code(
    built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("ldd is not installed")

    monkeypatch.setattr(rehearsal, "serving", broken)
    answer = rehearsal._answer(dump_toml(built()), 0)
    assert answer["refused"] == (
        "a dry episode could not be played: RuntimeError: ldd is not installed"
    )


def test_code_that_holds_the_interpreter_is_ended_with_its_line(built: Any) -> None:
    with pytest.raises(UnusableTask, match="held Python's interpreter for 2 s") as refused:
        rehearse(built(breaks="hold", hang_s=2.0))
    assert 're.match(r"(a+)+$"' in refused.value.frame


def test_a_run_refuses_a_task_only_if_its_first_episodes_all_fail(
    built: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_unplayable(built(failing=[0, 1]))
    said = capsys.readouterr().err
    assert said.count("an episode cannot be played: start of task 'broken' failed at") == 2
    with pytest.raises(UnusableTask, match="start of task 'broken' failed at"):
        refuse_unplayable(built(failing=[0, 1, 2]))
