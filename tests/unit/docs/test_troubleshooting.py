"""The messages and events of docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import re
from functools import cache

import pytest
from guides import ROOT

from composer_mesh.services.directory.channel_activity import WARNINGS

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
EVENTS = sorted({event for row in ROWS for event in re.findall(r"event `(\w+)`", row)})
MESSAGES = [row.strip("`") for row in ROWS if row.startswith("`")]


@cache
def source() -> str:
    """All text of the package, with the strings that continue on the next line joined."""
    folders = ("actors", "configs", "mesh", "planning", "rollouts", "services", "tasks", "plugins")
    texts = [one.read_text() for folder in folders for one in sorted((ROOT / folder).rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_printed(message: str) -> None:
    assert message in source()


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_of_the_page_is_recorded(event: str) -> None:
    assert f'"{event}"' in source()


def test_every_event_of_trouble_is_on_the_page() -> None:
    supervision = (ROOT / "docs" / "supervision.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)`", supervision, re.MULTILINE))
    ends = "failed|lost|refused|hung|died|given_up|missing"
    trouble = {one for one in named if re.search(f"_({ends})$", one) or one in WARNINGS}
    assert trouble - set(EVENTS) <= {"rollout_given_up", "display_lost", "run_failed"}
