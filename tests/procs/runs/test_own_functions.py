"""A whole run with the user's own loss, advantage and backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_run import SHORT
from safetensors.torch import load_file
from shared_runs import Finished

STEPS = 2
ROLLOUTS = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]


def readable_by_others(folder: Path) -> list[Path]:
    files = list(folder.rglob("*"))
    assert len(files) > 10
    return [path for path in files if path.stat().st_mode & 0o077]


def changed(run: Path, policy_cache: Path) -> set[str]:
    """The weights of a run's last checkpoint that are not those it began with."""
    checkpoint = run / "checkpoints" / f"step-{STEPS}"
    tokenizer = (checkpoint / "tokenizer.json").read_bytes()
    cached = policy_cache.glob("*/tokenizer.json")  # beside policies it has teachers' answers
    first = next(one.parent for one in cached if one.read_bytes() == tokenizer)
    before, after = (load_file(one / "model.safetensors") for one in (first, checkpoint))
    return {name for name, weight in after.items() if not weight.equal(before[name])}


def test_functions_of_a_named_folder_train_a_run_and_their_metrics_are_logged(
    own_functions: Finished, policies: Path
) -> None:
    """With a backend of theirs, which trains one weight.

    And no process imports what lies in its working directory, or leaves files behind.
    """
    run = own_functions.run
    assert own_functions.status == 0, run.stderr
    assert run.stderr == ""
    assert own_functions.seen["ran"] == []
    assert readable_by_others(run.root) == []
    logs = {path.name for path in (run.root / "logs").iterdir()}
    assert logs >= {"monarch-controller.log", "monarch-trainer.log", "monarch-generator-0.log"}
    assert own_functions.seen["left"] == []
    steps = run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["policy/custom/scale"] == 0.25
        assert step["policy/custom/advantage"] == pytest.approx(0.5)
        assert step["policy/custom/tokens"] == pytest.approx(step["tokens/trained"] / ROLLOUTS)
        # The ratio is about 1: the loss is minus scale times advantage, for each token.
        assert step["loss/policy"] == pytest.approx(-0.125, rel=0.2)
        assert "policy/clipped_fraction" not in step
        assert step["policy/custom/entropy"] > 0
    assert changed(run.root, policies) == {"model.norm.weight"}
