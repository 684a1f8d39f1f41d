"""docs/trackers.md says what the trackers do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

from guides import Guide

from composer_mesh.configs.tracking import TrackerSection, TrackingConfig
from composer_mesh.services.trackers.delivery import MOST_FAILURES, NAMES
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

PAGE = Guide.read("trackers.md")
SECTIONS = {
    get_args(member)[1].tag: get_args(member)[0] for member in get_args(get_args(TrackingConfig)[0])
}


def test_the_table_of_names_is_that_of_the_code() -> None:
    rows = dict(re.findall(r"^\| `([\w/]+)` \| `([\w/]+)` \|$", PAGE.text, re.MULTILINE))
    rows.pop("reward/of/NAME")
    assert rows == NAMES


def test_each_type_of_tracker_is_on_the_page_with_its_own_keys() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (`[^|]+) \|$", PAGE.text, re.MULTILINE))
    shared = set(TrackerSection.model_fields)
    assert {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in rows.items()} == {
        name: set(section.model_fields) - shared for name, section in SECTIONS.items()
    }


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    fields = TrackerSection.model_fields
    assert f"`queue` steps ({fields['queue'].default:,})" in PAGE.text
    assert f"`finish_s` seconds ({fields['finish_s'].default:g})" in PAGE.text
    assert f"fails {MOST_FAILURES} times in a row" in PAGE.text


def test_the_tracker_of_the_page_writes_its_lines(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.text, re.DOTALL)
    exec(compile(code, "docs/trackers.md", "exec"), names)
    tracker = names["LinesTracker"]()
    assert tracker.start(TrackedRun("unit", tmp_path / "own", {})) == str(tmp_path / "own")
    tracker.log(TrackedStep(1, 0.0, {"train/reward": 0.5}))
    tracker.finish("finished")
    line = json.loads((tmp_path / "own" / "lines.jsonl").read_text())
    assert line == {"step": 1, "train/reward": 0.5}
