"""An ablation of real runs: one command, one Monarch, several meshes one after another."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from live_run import PRESET, SHORT, composer_mesh

pytestmark = pytest.mark.timeout(600)

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
        assert active == {"policy": STEPS, "sdpo": on, "replay": on}
    before = [run["evaluations"][0]["success"] for run in report["runs"]]
    assert before[0] == before[1]  # the same policy on the same episodes
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    again = ablate(tmp_path, policy_cache)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("kept, it finished earlier") == len(report["runs"])
    assert "phase" not in again.stdout
