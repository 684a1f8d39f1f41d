"""tinker-cookbook's own training loops on local data, against `composer-mesh serve`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served_process import ROOT, Sdk, Server, run_script

from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config


def column(lines: list[dict[str, Any]], ending: str) -> list[float]:
    """Return the values of the metric whose name has an ending."""
    return [value for line in lines for name, value in line.items() if name.endswith(ending)]


@pytest.mark.parametrize("loop", ["dpo", "rl", "distill"])
def test_a_loop_of_the_cookbook_trains(
    sdk: Sdk, serve: Callable[..., Server], tmp_path: Path, loop: str
) -> None:
    config, folder = load_config(ROOT / "configs" / "quickstart.toml"), tmp_path / "policy"
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    policy.save_policy(policy.build_model(config.policy, tokenizer, 1), tokenizer, folder)
    server = serve(f"policy.path={folder}", f"serve.base_model={folder}")
    script = run_script(
        sdk("cookbook"), "cookbook_loops.py", server.url, str(folder), loop, str(tmp_path / loop)
    )
    told, _ = script.communicate(timeout=400)
    assert script.returncode == 0
    lines = json.loads(told.splitlines()[-1])
    if loop == "dpo":
        losses = column(lines, "dpo_loss")
        assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
        assert losses[-1] < losses[0] - 0.01
    elif loop == "rl":
        rewards = column(lines, "env/all/reward/total")
        assert len(rewards) == 6
        assert rewards[-1] > rewards[0] + 0.02
    else:
        divergences = column(lines, "teacher_kl")
        assert len(divergences) == 6
        assert abs(divergences[0]) < 1e-3
    server.stop()
