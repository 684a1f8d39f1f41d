"""A TRL run with three channels that is killed and resumed, and one whose weights are sharded.

And AsyncGRPOTrainer on the mesh: in two processes, and with adapters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from learning import write_policy
from process_trees import run_tree

SCRIPT = Path(__file__).parents[1] / "helpers" / "trl_ranks.py"
TESTS = Path(__file__).parents[3]
HELPERS = (SCRIPT.parent, TESTS / "unit" / "helpers", TESTS / "procs" / "helpers")
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, HELPERS)),
    "OMP_NUM_THREADS": "1",
}
LIMIT_S = 300.0


def command(folder: Path, steps: int, *options: str, ranks: int = 1) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    run = launch if ranks > 1 else []
    return [sys.executable, *run, str(SCRIPT), str(folder), str(steps), *options]


def finished(folder: Path, steps: int, *options: str, ranks: int = 1) -> list[dict[str, Any]]:
    ended = run_tree(command(folder, steps, *options, ranks=ranks), env=ENV, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_that_was_killed_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_policy(whole)
    shutil.copytree(whole, killed)
    (uninterrupted,) = finished(whole, 4, "--save")
    process = subprocess.Popen(command(killed, 4, "--save", "--hang-at", "2"), env=ENV)
    deadline = time.monotonic() + LIMIT_S
    while not (killed / "hangs").exists():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline, "it has never reached its third step"
        time.sleep(0.1)
    process.kill()
    process.wait()
    (resumed,) = finished(killed, 4, "--save", "--resume")
    assert resumed["weights"] == uninterrupted["weights"]
    assert [one["loss"] for one in resumed["logs"]] == [
        one["loss"] for one in uninterrupted["logs"]
    ]


@pytest.mark.timeout(2 * LIMIT_S)
def test_weights_sharded_by_fsdp2_have_the_losses_and_gradients_of_whole_ones() -> None:
    script = SCRIPT.with_name("trl_sharded.py")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    ended = run_tree([sys.executable, *launch], env=ENV, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.timeout(3 * LIMIT_S)
def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    write_policy(tmp_path)
    (alone,) = finished(tmp_path, 2)
    first, second = finished(tmp_path, 2, ranks=2)
    assert first["weights"] == second["weights"]
    for one, other in zip(first["logs"], alone["logs"], strict=True):
        for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total", "grad_norm"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


def asynchronous(folder: Path, *options: str, ranks: int = 1) -> list[dict[str, Any]]:
    """What the processes of AsyncGRPOTrainer have logged, and their weights."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    script = SCRIPT.with_name("trl_async_ranks.py")
    run = [*(launch if ranks > 1 else []), str(script), str(folder), str(ranks), *options]
    ended = run_tree([sys.executable, *run], env=ENV, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.timeout(4 * LIMIT_S)
def test_the_mesh_serves_two_processes_as_one_and_merged_adapters(tmp_path: Path) -> None:
    (alone,) = asynchronous(tmp_path / "alone")
    first, second = asynchronous(tmp_path / "both", ranks=2)
    (adapted,) = asynchronous(tmp_path / "adapted", "--peft")
    assert first["weights"] == second["weights"]
    for run in (alone, first, adapted):
        steps = [line for line in run["logs"] if "loss" in line]
        assert len(steps) == 3
        # Of the initial policy, which is all that the first step's rollouts were played with.
        assert steps[0]["loss"] == pytest.approx(alone["logs"][0]["loss"], abs=1e-5)
        assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
        assert max(line["sample/staleness_max"] for line in steps) <= 2
    assert first["logs"][0]["grad_norm"] == pytest.approx(alone["logs"][0]["grad_norm"], abs=1e-4)
