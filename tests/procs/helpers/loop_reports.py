"""What the watchdogs of event loops have reported since somebody looked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from composer_mesh.mesh.loop_watchdog import REPORTS

_taken_bytes: dict[Path, int] = {}


def taken() -> list[dict[str, Any]]:
    """Return the reports of all processes of this session that no earlier call returned.

    Files stay: removed between its creation and its first line, a file would lose the report.
    """
    found = []
    for file in sorted(Path(os.environ[REPORTS]).glob("*.jsonl")):
        begin = _taken_bytes.get(file, 0)
        unread = file.read_bytes()[begin:]
        lines = unread[: unread.rfind(b"\n") + 1]
        found += [json.loads(line) for line in lines.splitlines()]
        _taken_bytes[file] = begin + len(lines)
    return found


def told(reports: list[dict[str, Any]]) -> str:
    """Reports for a reader of a failed test."""
    return "\n".join(f"{one['process']}, {one['seconds']} s:\n{one['stack']}" for one in reports)
