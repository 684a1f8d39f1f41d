"""PRIME-RL's real loss module runs our losses, and ours runs its default: the same numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[1] / "unit" / "recorded" / "prime_rl.json"


@pytest.fixture(scope="module")
def found(prime_rl: dict[str, str]) -> dict[str, Any]:
    script = Path(__file__).with_name("real_losses.py")
    ended = subprocess.run(
        [sys.executable, str(script)], env=prime_rl, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def test_losses_and_gradients_are_equal_whoever_calls_whom(found: dict[str, Any]) -> None:
    for theirs, ours in found["pairs"]:
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert len(found["pairs"]) == 12


def test_every_policy_loss_of_ours_trains_there(found: dict[str, Any]) -> None:
    for kind, numbers in found["types"].items():
        assert all(map(math.isfinite, numbers)), kind
        assert any(numbers[1:]), kind


def test_the_sampled_sdpo_term_reads_the_teacher_that_it_hands_out(found: dict[str, Any]) -> None:
    without, with_term = found["sdpo"]
    assert without != with_term


def test_the_recorded_fields_are_those_of_the_commit(found: dict[str, Any]) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert {name: found[name] for name in ("fields", "custom", "compute_loss")} == {
        name: recorded[name] for name in ("fields", "custom", "compute_loss")
    }
