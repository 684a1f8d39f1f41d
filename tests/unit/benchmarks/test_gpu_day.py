"""`make gpu-day` in the form that needs no GPU: every part runs, and none costs another."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_day.py"
DAY: Any = importlib.import_module("gpu_day")
PARTS: Any = importlib.import_module("gpu_parts")
TABLES: Any = importlib.import_module("gpu_tables")
CARRY: Any = importlib.import_module("gpu_carry")

WITHOUT_MONARCH = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "monarch":
            raise ModuleNotFoundError("No module named 'monarch'", name="monarch")

sys.meta_path.insert(0, Missing())
"""
BAD_PARTS = """
import os, time
import gpu_parts

gpu_parts.LIMIT_S = 6.0

def crashes(bench):
    yield gpu_parts.Row("a row before", 1.0, "s", 2.0, 0.7)
    raise ValueError("it broke")

def dies(bench):
    os.kill(os.getpid(), 9)

def hangs(bench):
    yield gpu_parts.Row("a row of what hangs", 1.0, "s", 2.0)
    time.sleep(1000)

gpu_parts.PARTS = {"crashes": crashes, "dies": dies, "hangs": hangs, "works": lambda bench: [
    gpu_parts.Row("works", 3.0, "s", 2.0, 1.0)
]}
"""


def measure(tmp_path: Path, sitecustomize: str, *words: str) -> tuple[Any, dict[str, Any]]:
    """Run the dry form, with a module that Python imports at the start of every process."""
    (tmp_path / "sitecustomize.py").write_text(sitecustomize, encoding="utf-8")
    file = tmp_path / "found.json"
    path = os.pathsep.join([str(tmp_path), str(ROOT / "benchmarks"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry", "--json", str(file), *words],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    return done, json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.timeout(1300)
def test_every_part_runs_without_a_gpu_and_without_monarch(tmp_path: Path) -> None:
    done, found = measure(tmp_path, WITHOUT_MONARCH, "--budget", "1100")
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = {name for name, one in found["parts"].items() if one["status"] == "left out"}
    assert left_out == {"run", "smollm2"}
    assert all("monarch is not installed" in found["parts"][name]["why"] for name in left_out)
    assert set(found["parts"]) == {"limits", *DAY.ALL}
    rows = [row for one in found["parts"].values() for row in one["rows"]]
    assert all(row["ratio"] >= 0 for row in rows)
    assert all(row["met"] is None for row in rows)
    of_losses = [row for row in found["parts"]["losses"]["rows"] if row["unit"] == "TFLOP/s"]
    assert all(sum(one["share"] for one in row["profile"][:8]) > 0.3 for row in of_losses)
    assert any(one["of_limit"] for row in of_losses for one in row["profile"])
    assert found["torch"] == torch.__version__


@pytest.mark.timeout(1300)
def test_a_part_that_crashes_dies_or_hangs_costs_no_other(tmp_path: Path) -> None:
    words = [word for name in ("crashes", "dies", "hangs", "works") for word in ("--part", name)]
    done, found = measure(tmp_path, BAD_PARTS, *words)
    parts = found["parts"]
    assert done.returncode == 1
    assert {name: one["status"] for name, one in parts.items()} == {
        "limits": "done",
        "crashes": "failed",
        "dies": "failed",
        "hangs": "out of time",
        "works": "done",
    }
    assert "ValueError: it broke" in parts["crashes"]["why"]
    assert [row["name"] for row in parts["crashes"]["rows"]] == ["a row before"]
    assert "ended with status -9" in parts["dies"]["why"]
    assert [row["name"] for row in parts["hangs"]["rows"]] == ["a row of what hangs"]


def test_what_no_longer_fits_is_skipped_and_keeps_earlier_results(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    earlier = {**DAY.machine(dry=True), "parts": {"weights": {"status": "done", "rows": []}}}
    file.write_text(json.dumps(earlier), encoding="utf-8")
    day = DAY.Day(file, dry=True, budget=0)
    day.measure([DAY.LIMITS, "weights"])
    found = json.loads(file.read_text(encoding="utf-8"))["parts"]
    assert {name: one["status"] for name, one in found.items()} == {
        "weights": "done",
        "limits": "skipped",
    }
    assert "0 s remain" in found["limits"]["why"]
    file.write_text(json.dumps({**earlier, "card": "another"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="is of card another but this is CPU"):
        DAY.Day(file, dry=True, budget=0)


@pytest.mark.parametrize(
    ("bar", "at_most", "met"),
    [(0.5, False, True), (0.51, False, False), (0.5, True, True), (0.49, True, False)],
)
def test_a_bar_is_met_from_its_side_and_tiny_sizes_are_not_judged(
    bar: float, at_most: bool, met: bool
) -> None:
    row = PARTS.Row("half", 1.0, "s", 2.0, bar, at_most)
    assert (row.met, row.as_json()["met"]) == (met, met)
    assert row.as_json(judged=False)["met"] is None
    assert PARTS.Row("half", 1.0, "s", 2.0).as_json()["met"] is None


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


def test_the_page_has_the_tables_of_the_newest_results(tmp_path: Path) -> None:
    page = TABLES.PAGE.read_text(encoding="utf-8")
    assert page == TABLES.with_tables(page, TABLES.RESULTS), "run benchmarks/gpu_tables.py"
    kernel = {"name": "gemm", "share": 0.5, "of_limit": None}
    missed = PARTS.Row("a|b", 1.0, "s", 2.0, 0.7, profile=[kernel]).as_json()
    for day, value in (("2026-01-02", 3.0), ("2026-01-01", 1.0)):
        part = {"status": "done", "why": "", "rows": [{**missed, "value": value}], "commit": "c"}
        found = {**DAY.machine(dry=True), "dry": False, "day": day, "parts": {"losses": part}}
        (tmp_path / f"{value:.0f}.json").write_text(json.dumps(found), encoding="utf-8")
    assert "| a\\|b | 3 s | 2 | 0.50 | >= 0.7, missed: gemm 50% |" in TABLES.tables(tmp_path)
    assert "2026-01-01" not in TABLES.tables(tmp_path)


def test_pieces_of_packages_are_put_together_again(tmp_path: Path) -> None:
    wheels, arrived = tmp_path / "wheels", tmp_path / "arrived"
    wheels.mkdir()
    contents = {"a.whl": bytes(range(250)), "b.whl": b"b" * 30, "c.whl": b"c" * 101}
    for name, content in contents.items():
        (wheels / name).write_bytes(content)
    assert CARRY.cut(wheels, tmp_path, most=100) == 4
    folders = [tmp_path / str(number) for number in range(1, 5)]
    for folder in folders:
        assert sum(one.stat().st_size for one in folder.iterdir()) <= 100
    arrived.mkdir()
    for folder in folders:
        folder.rename(arrived / folder.name)
    found = CARRY.join(arrived, tmp_path / "joined")
    assert {one.name: one.read_bytes() for one in found} == contents
    (arrived / "1").rename(tmp_path / "lost")
    with pytest.raises(ValueError, match="lacks pieces"):
        CARRY.join(arrived, tmp_path / "joined")
