"""What the watchdogs of event loops have reported since somebody looked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from composer_mesh.mesh.loop_watchdog import REPORTS


def taken() -> list[dict[str, Any]]:
    """The reports of all processes that this session has started; they are gone then."""
    found = []
    for file in sorted(Path(os.environ[REPORTS]).glob("*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
    return found


def told(reports: list[dict[str, Any]]) -> str:
    """Reports for a reader of a failed test."""
    return "\n".join(f"{one['process']}, {one['seconds']} s:\n{one['stack']}" for one in reports)
