"""TRL's trainer with three channels in two processes: their weights end bit-equal."""

import json
import os
import sys
from pathlib import Path

import pytest
from learning import write_policy
from process_trees import run_tree

SCRIPT = Path(__file__).parents[1] / "helpers" / "trl_ranks.py"
LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def test_two_processes_train_one_policy_and_end_bit_equal(tmp_path: Path) -> None:
    write_policy(tmp_path)
    ended = run_tree(
        [sys.executable, *LAUNCH, str(SCRIPT), str(tmp_path), "1"],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"] != first["before"]
    log = first["logs"][-1]
    total = log["loss/policy"] + 0.5 * log["loss/sdpo"] + 0.3 * log["loss/replay"]
    assert log["loss/total"] == pytest.approx(total, abs=1e-6)
    assert log["loss"] == pytest.approx(total, abs=1e-5)
    assert min(log["loss/sdpo"], log["loss/replay"], log["sdpo/tokens"]) > 0
    assert log["replay/pairs"] == 3
