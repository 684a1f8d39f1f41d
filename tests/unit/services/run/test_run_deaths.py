"""The deaths of a run's processes, which its reward curve marks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from composer_mesh.services.run.tracking import deaths_of


def written(run: Path, name: str, *lines: Any) -> None:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (run / name).write_text(text)


def test_each_death_has_the_steps_that_were_done_by_then(tmp_path: Path) -> None:
    killed = "its process failed: Killed(sig=9)"
    written(
        tmp_path,
        "events.jsonl",
        {"time": 1.0, "event": "run_started", "actor": ""},
        {"time": 5.0, "event": "actor_died", "actor": "generator-1", "detail": killed},
        {"time": 6.0, "event": "actor_restarted", "actor": "generator-1.2"},
        {"time": 25.0, "event": "actor_died", "actor": "\x1b[31m" + "x" * 99, "detail": "exit 1"},
        "no JSON\n",
        {"time": "late", "event": "actor_died", "actor": "trainer"},
        {"time": 60.0, "event": "run_started", "actor": ""},
        {"time": 61.0, "event": "run_stopped", "actor": ""},
        {"time": 70.0, "event": "run_started", "actor": ""},
    )
    steps = [{"step": n, "began": 0, "ended": 10.0 * n, "busy": []} for n in (1, 2, 3, 2, 3)]
    written(tmp_path, "timeline.jsonl", *steps, {"step": None, "ended": 0.0})
    found = deaths_of(tmp_path)
    assert found[0] == (0, "generator-1 killed")
    assert found[1][0] == 2
    assert found[1][1].endswith(" died")
    assert "\x1b" not in found[1][1]
    assert len(found[1][1]) < 60
    assert found[2:] == [(3, "controller killed")]


def test_a_run_without_deaths_or_without_files_has_none(tmp_path: Path) -> None:
    assert deaths_of(tmp_path) == []
    written(tmp_path, "events.jsonl", {"time": 1.0, "event": "run_started"})
    assert deaths_of(tmp_path) == []


def test_a_run_without_a_timeline_still_has_its_deaths(tmp_path: Path) -> None:
    written(tmp_path, "events.jsonl", {"time": 1.0, "event": "actor_died", "actor": "trainer"})
    assert deaths_of(tmp_path) == [(0, "trainer died")]
