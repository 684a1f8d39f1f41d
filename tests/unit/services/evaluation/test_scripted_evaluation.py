"""`eval --policy`: a task's gold actions, or empty answers, played without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_mesh.services import cli
from composer_mesh.services.evaluation.report import ABOUT_FILE

TASK = """
import random
from composer_mesh import Row, Task, Transcript, reward


class Sums(Task):
    def generate(self, rng: random.Random) -> Row:
        return {"a": rng.randint(1, 999)}

    def prompt(self, row: Row) -> str:
        return f"What is {row['a']} plus 1?"

    @reward
    def correct(self, transcript: Transcript) -> float:
        return float(transcript.answer == str(transcript.row["a"] + 1))


class Solved(Sums):
    def gold(self, row: Row) -> list[str]:
        return [str(row["a"] + 1)]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(TASK)
    path = tmp_path / "sums.toml"
    path.write_text('[run]\nname = "s"\nsteps = 1\n[data]\ntask = "sums.py:Solved"\n')
    return path


@pytest.mark.parametrize(("policy", "share"), [("gold", 1.0), ("empty", 0.0)])
def test_a_scripted_policy_is_scored_without_a_model(
    config: Path, tmp_path: Path, policy: str, share: float
) -> None:
    figures = tmp_path / "figures.json"
    line = ["eval", str(config), "--policy", policy, "--json", str(figures)]
    assert cli.main([*line, "--set", "eval.episodes=3"]) == 0
    found = json.loads(figures.read_text())
    assert found["tasks"]["solved"]["success"]["mean"] == share
    assert found["tasks"]["solved"]["episodes"] == 3
    assert json.loads((tmp_path / "runs/s-eval" / ABOUT_FILE).read_text())["model"] == policy


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--set", "data.task=sums.py:Sums"], "states no gold actions: define gold"),
        (["--samples", "2", "--set", "eval.temperature=1.0"], "always acts the same"),
    ],
)
def test_a_scripted_policy_that_cannot_be_played_is_refused_before_anything_is_stored(
    config: Path,
    tmp_path: Path,
    options: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["eval", str(config), "--policy", "gold", *options]) == 2
    assert reason in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "runs").exists()
