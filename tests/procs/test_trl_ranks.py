"""TRL's trainer with three channels in two processes: one run, whose weights are bit-equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from learning import write_policy

SCRIPT = Path(__file__).parents[1] / "unit" / "helpers" / "trl_ranks.py"


def ranks(folder: Path, count: int, *options: str) -> list[dict[str, Any]]:
    """Run the script to its end on some ranks; return what each of them writes."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone"]
    command = [sys.executable, *(launch if count > 1 else []), str(SCRIPT), str(folder), *options]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "TOKENIZERS_PARALLELISM": "false"}


def test_two_processes_are_one_run_and_end_bit_equal(tmp_path: Path) -> None:
    write_policy(tmp_path)
    first, second = ranks(tmp_path, 2, "1")
    assert first["weights"] == second["weights"]
    (alone,) = ranks(tmp_path, 1, "1")
    for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total", "grad_norm"):
        assert first["logs"][-1][name] == pytest.approx(alone["logs"][-1][name], abs=1e-5)
    assert first["logs"][-1]["sdpo/tokens"] == alone["logs"][-1]["sdpo/tokens"] > 0
