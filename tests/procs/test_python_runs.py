"""Runs from Python: followed, scaled, stopped, killed and resumed by the public names."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from guides import Guide
from live_run import ENDLESS, PRESET, RUN_DEADLINE_S, SHORT, wait_until

import composer_mesh
from composer_mesh import ConfigError, Run, RunFailed, load_config, train


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changes(policy_cache: Path, **more: Any) -> dict[str, Any]:
    return SHORT | {"policy.cache_dir": policy_cache} | more


async def test_a_run_is_followed_and_scaled_inside_a_loop(here: Path, policy_cache: Path) -> None:
    run = train(load_config(PRESET), changes(policy_cache, **ENDLESS))
    steps = []
    async for step in run:
        steps.append(step["step"])
        if len(steps) == 1:
            assert run.scale(generator=2) == {"generator": {"before": 1, "after": 2}}
            assert run.tree()["state"] in ("running", "evaluating")
            assert run.summary() is None
        if len(steps) == 3:
            assert run.stop() == 0
    assert steps == list(range(1, len(steps) + 1))
    assert len(list(run.rollouts())) >= 3 * 2 * 4
    assert run.events()[0]["event"] == "run_started"
    assert list(run.metrics()["step"]) == steps
    assert Run("runs/quickstart").wait().steps() == run.steps()


def test_a_stopped_run_ended_well_and_a_killed_one_did_not(here: Path, policy_cache: Path) -> None:
    endless = changes(policy_cache, **ENDLESS)
    run = train(PRESET, endless, output="run")
    wait_until(run.steps, "step", RUN_DEADLINE_S)
    assert run.stop() == 0
    assert not run.wait().live
    run = train(PRESET, endless, output="run", resume=True)
    assert run._pid is not None
    os.kill(run._pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"was killed by signal 9, see run\.log"):
        run.wait()
    assert not Run("run").live


def test_what_cannot_start_is_refused_at_once(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean run\.steps"):
        train(PRESET, {"run.step": 3})
    with pytest.raises(RunFailed, match="holds no run but must be the directory of one"):
        train(PRESET, output="nothing", resume=True)
    with pytest.raises(RunFailed, match="nothing"):
        composer_mesh.evaluate("nothing")


def test_the_code_of_the_guide_runs_and_has_a_summary_at_its_end(
    here: Path, policy_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs").symlink_to(PRESET.parent)
    (block, *_) = Guide.read("python.md").blocks("python")
    assert "20}" in block
    exec(block.replace('{"run.steps": 20}', "short"), {"short": changes(policy_cache)})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:-1]] == ["1", "2", "3"]
    assert 0 <= float(shown[-1]) <= 1
    assert Run("runs/quickstart").wait().summary() is not None
