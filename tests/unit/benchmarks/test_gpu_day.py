"""`make gpu-check` in the form that needs no GPU: every part runs, with and without Monarch."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
PARTS: Any = importlib.import_module("gpu_parts")

WITHOUT_MONARCH = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "monarch":
            raise ModuleNotFoundError("No module named 'monarch'", name="monarch")

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_part_runs_without_a_gpu_and_without_monarch(tmp_path: Path) -> None:
    script, found = ROOT / "benchmarks" / "gpu_check.py", tmp_path / "found.json"
    command = [sys.executable, "-c", WITHOUT_MONARCH, str(script), "--dry", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(found.read_text(encoding="utf-8"))
    assert [name for name in report["figures"] if "left out" in name or "failed" in name] == []
    assert {f"{part}: seconds" for part in PARTS.PARTS} <= report["figures"].keys()
    assert len(report["ratios"]) == 12
    assert all(ratio > 0 for ratio in report["ratios"].values())


def test_a_part_that_fails_ends_with_its_name_and_status_1() -> None:
    source = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import gpu_check, gpu_parts\n"
        "gpu_check.ALL['losses'] = lambda bench: 1 / 0\n"
        "sys.exit(gpu_check.main())"
    )
    command = [sys.executable, "-c", source, str(ROOT / "benchmarks"), "--dry", "--part", "losses"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "failed: losses" in done.stderr


def test_as_many_layers_train_as_fit_and_at_least_one() -> None:
    real = PARTS.REAL
    assert real.layer_weights == 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12_288
    assert [real.layers_that_train(gib << 30) for gib in (1, 80, 1 << 20)] == [1, 10, 36]
    weights = 10 * real.layer_weights + 2 * real.vocabulary * real.hidden
    assert 16 * weights < 0.6 * (80 << 30) < 16 * (weights + real.layer_weights)


def test_the_parts_divide_what_is_copied_without_gaps() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4), torch.zeros(1, 2)]
    host = torch.zeros(48, dtype=torch.uint8)
    places = PARTS._places(host, tensors)
    assert [place.shape for place in places] == [one.shape for one in tensors]
    assert [place.data_ptr() - host.data_ptr() for place in places] == [0, 24, 40]
