"""A run with a task, a channel, a tracker and a section of another package."""

from __future__ import annotations

import json
from pathlib import Path

from strangers import CONFIG, Environment


def test_a_run_uses_what_another_package_registers(
    tmp_path: Path,
) -> None:
    environment = Environment.with_polite(tmp_path / "environment")
    (tmp_path / "run.toml").write_text(CONFIG)
    done = environment.run("train", "run.toml", "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    (metrics,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["loss/likely"] > 0
    notes = (tmp_path / "notes.txt").read_text().splitlines()
    assert notes[0] == "start good day"
    assert "step 1" in notes
    assert notes[-1] == "finished"
    greeted = environment.run("greet", "run/config.toml", cwd=tmp_path)
    assert greeted.stdout == "good day all\n"
