"""On the same samples the mesh and TRL's GRPOTrainer end with the same weights."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "trl_equality.py"


def test_the_weights_of_both_trainers_are_equal_but_for_rounding(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    subprocess.run([sys.executable, BENCHMARK, "--quick", "--json", found], check=True)
    assert 0 < json.loads(found.read_text(encoding="utf-8"))["ratios"]["distance"] < 1e-3
