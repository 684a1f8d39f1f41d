"""Supervised runs in real processes: they heal as `train` does, and `train` starts from them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from live_run import GONE_DEADLINE_S, LiveRun, launched, untimed, wait_until
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS = 20
SFT = {
    "sft.steps": STEPS,
    "sft.batch_size": 48,
    "sft.demonstrations": 100,
    "sft.lr": 1e-3,
    "trainer.checkpoint_every": 4,
    "eval.episodes": 4,
}
"""Steps of some tenths of a second, in ten epochs."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> LiveRun:
    """A supervised run that is left alone."""
    root = tmp_path_factory.mktemp("alone") / "run"
    with launched(root, policy_cache, SFT, command="sft") as run:
        assert run.wait() == 0, run.stderr
    return run


def weights(run: LiveRun) -> dict[str, torch.Tensor]:
    return load_file(run.root / "checkpoints" / f"step-{STEPS}" / "model.safetensors")


def losses(run: LiveRun) -> list[float]:
    return [step["loss/sft"] for step in run.objects("metrics.jsonl")]


def test_a_supervised_run_trains_evaluates_and_reports(alone: LiveRun) -> None:
    steps = alone.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert losses(alone)[-1] < losses(alone)[0]
    for step in steps:
        assert step["loss/total"] == step["loss/sft"]
        off = ("loss/policy", "loss/sdpo", "loss/replay", "reward/mean")
        assert [step[name] for name in off] == [None] * 4
        assert step["tokens/trained"] > 0
        assert step["rollouts/count"] == step["replay/pairs"] == step["sdpo/tokens"] == 0
    summary = alone.summary()
    assert summary["channels"]["sft"] == {"active_steps": STEPS, "configured": True}
    assert summary["channels"]["policy"] == {"active_steps": 0, "configured": False}
    assert [summary["eval"][when]["episodes"] for when in ("initial", "final")] == [4, 4]
    (event,) = alone.events("conversations")
    assert event["detail"].startswith("100 conversations of")
    assert {one["actor"] for one in alone.events("actor_started")} <= {
        *("trainer", "generator-0", "environment-0", "rollouts-0")
    }
    folder = alone.root / "checkpoints" / f"step-{STEPS}"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0


def test_a_killed_trainer_and_a_killed_controller_change_no_step(
    tmp_path: Path, policy_cache: Path, alone: LiveRun
) -> None:
    root = tmp_path / "run"
    with launched(root, policy_cache, SFT, command="sft") as run:
        run.until(lambda run: len(run.lines("metrics.jsonl")) >= 2, "step 2")
        os.kill(run.pids()["trainer"], signal.SIGKILL)
        run.until(lambda run: len(run.lines("metrics.jsonl")) >= 6, "step 6")
        run.signal_group(signal.SIGKILL)
        run.process.wait()
        wait_until(lambda: not run.living(), "end of the last process", GONE_DEADLINE_S)
    assert len(run.events("trainer_restarted")) == 1
    assert len(run.lines("metrics.jsonl")) < STEPS
    options = ("--resume",)
    with launched(root, policy_cache, SFT, options=options, command="sft") as run:
        assert run.wait() == 0, run.stderr
    assert run.events("run_resumed")
    found = [[untimed(step) for step in one.objects("metrics.jsonl")] for one in (alone, run)]
    assert json.dumps(found[0]) == json.dumps(found[1])
    expected = weights(alone)
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_several_ranks_share_the_conversations_of_a_step(
    tmp_path: Path, policy_cache: Path, alone: LiveRun
) -> None:
    settings = {**SFT, "trainer.ranks": 2, "trainer.packing": "true"}
    with launched(tmp_path / "run", policy_cache, settings, command="sft") as run:
        assert run.wait() == 0, run.stderr
    assert losses(run) == pytest.approx(losses(alone), abs=1e-4)
    (one, other) = ([s["tokens/trained"] for s in r.objects("metrics.jsonl")] for r in (alone, run))
    assert one == other


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> LiveRun:
    """A supervised run that trains adapters, and another one is refused in its place."""
    root = tmp_path_factory.mktemp("adapters") / "run"
    settings = {**SFT, "trainer.lora.rank": 8, "sft.lr": 1e-2}
    with launched(root, policy_cache, settings, command="sft") as run:
        assert run.wait() == 0, run.stderr
    return run


def test_adapters_are_trained_and_end_in_a_whole_model(adapters: LiveRun) -> None:
    assert losses(adapters)[-1] < losses(adapters)[0]
    folder = adapters.root / "checkpoints" / f"step-{STEPS}"
    assert (folder / "model.safetensors").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0


def test_a_row_that_is_no_conversation_ends_the_run_by_its_number(
    tmp_path: Path, policy_cache: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n')
    settings = {**SFT, "sft.demonstrations": 0, "sft.path": rows}
    with launched(tmp_path / "run", policy_cache, settings, command="sft") as run:
        assert run.wait() == 1
    assert run.stderr.splitlines() == [
        f"composer-mesh: {rows}, row 1: no message to imitate: give it one of the role 'assistant'"
    ]


@pytest.mark.parametrize("kind", ["alone", "adapters"])
def test_a_run_starts_from_a_supervised_one_and_says_so(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, policy_cache: Path
) -> None:
    start: LiveRun = request.getfixturevalue(kind)
    settings: dict[str, Any] = {
        **SFT,
        "policy.start": f"sft:{start.root}",
        "run.steps": 1,
        "replay.beta": 0,
    }
    root = tmp_path / "run"
    with launched(root, policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    folder = start.root / "checkpoints" / f"step-{STEPS}"
    assert [event["detail"] for event in run.events("policy_ready")] == [str(folder)]
    assert (
        run.summary()["eval"]["initial"]["success"] == start.summary()["eval"]["final"]["success"]
    )
    first = run.root / "config.toml"
    assert f'path = "{folder}"' in first.read_text()
    assert "[sft]" not in first.read_text()
