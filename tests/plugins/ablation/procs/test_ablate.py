"""An ablation of real runs: one command, one Monarch, several meshes one after another."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from commands import forked
from live_run import PRESET, RUN_DEADLINE_S, SHORT, composer_mesh, wait_until

STEPS = 2


def ablate(output: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    values = {**SHORT, "run.steps": STEPS, "policy.cache_dir": cache}
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    choices = ["--arms", "neither,both", "--seeds", "0", "--output", str(output)]
    return composer_mesh("ablate", str(PRESET), *overrides, *choices)


def test_two_arms_are_trained_in_one_process_and_kept(tmp_path: Path, policy_cache: Path) -> None:
    done = ablate(tmp_path, policy_cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "held-out success by step" in done.stdout
    report = json.loads((tmp_path / "ablation.json").read_text())
    assert [(run["arm"], run["state"]) for run in report["runs"]] == [
        ("neither", "finished"),
        ("both", "finished"),
    ]
    for run in report["runs"]:
        assert [e["step"] for e in run["evaluations"]] == [0, 1, 2]
        assert {e["episodes"] for e in run["evaluations"]} == {SHORT["eval.episodes"]}
        assert run["wall_s"] > 0
        summary = json.loads((tmp_path / run["directory"] / "summary.json").read_text())
        active = {name: about["active_steps"] for name, about in summary["channels"].items()}
        on = STEPS if run["arm"] == "both" else 0
        lines = (tmp_path / run["directory"] / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        mixed = sum(step["rollouts/flat_groups"] < step["rollouts/groups"] for step in steps)
        assert len(steps) == STEPS
        assert active == {"policy": mixed, "sdpo": on, "replay": on}
    before = [run["evaluations"][0]["success"] for run in report["runs"]]
    assert before[0] == before[1]  # the same policy on the same episodes
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    again = ablate(tmp_path, policy_cache)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("kept, it finished earlier") == len(report["runs"])
    assert "phase" not in again.stdout


OPTIONS = {
    **SHORT,
    "run.steps": 4,
    "schedule.max_lag": 0,
    "trainer.checkpoint_every": 1,
    "trainer.update_share_every": 1,
    "sdpo.max_update_share": 0.3,
    "sdpo.advantage_sites": 8,
    "sdpo.right_action": "no_error",
    "replay.weight_pairs_by": "margin",
}
"""Whatever says whether a channel works is on."""


def test_a_half_run_of_a_setting_is_resumed_to_the_steps_of_one_that_was_not_stopped(
    tmp_path: Path, policy_cache: Path
) -> None:
    values = {**OPTIONS, "policy.cache_dir": policy_cache}
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    command = ["ablate", str(PRESET), *overrides, "--arms", "both", "--seeds", "0"]
    command += ["--difficulty", "replay.states_per_step=4", "--deviation", "5"]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    place = Path("quickstart-states_per_step-4", "both", "seed-0")
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = forked([*command, "--output", str(stopped)], out, out)
        metrics = stopped / place / "metrics.jsonl"
        wait_until(
            lambda: process.poll() is not None or (metrics.exists() and metrics.read_text()),
            "first step",
            RUN_DEADLINE_S,
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(RUN_DEADLINE_S) == 130, log.read_text()
    done = len(metrics.read_text().splitlines())
    assert 1 <= done < 4
    again = composer_mesh(*command, "--output", str(stopped))
    assert again.returncode == 0, again.stderr
    assert "resumed where it was stopped" in again.stdout
    assert "moved an unfinished one" not in again.stdout
    other = composer_mesh(*command, "--output", str(whole))
    assert other.returncode == 0, other.stderr
    both = [
        [json.loads(line) for line in (root / place / "metrics.jsonl").read_text().splitlines()]
        for root in (stopped, whole)
    ]
    assert [len(steps) for steps in both] == [4, 4]
    for resumed, one in zip(*both, strict=True):
        for name in one:
            if name.startswith(("loss/", "update/", "policy/grad", "sdpo/advantage", "reward/")):
                assert resumed[name] == one[name], name
    assert any(step["update/share_sdpo"] > 0 for step in both[0])
    assert all(step["update/share_sdpo"] <= 0.3 + 1e-6 for step in both[0])
    page = (stopped / "ablation.md").read_text()
    assert "1 seed can see no difference" in page
    assert (stopped / "difficulty.png").read_bytes().startswith(b"\x89PNG")
