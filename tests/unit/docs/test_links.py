"""Every link inside the repository leads to a file, and to a heading of it if it names one."""

from __future__ import annotations

from pathlib import Path

import pytest
from guides import ROOT, Guide

FOLDERS = (ROOT / "docs", ROOT / "examples")
PAGES = [*ROOT.glob("*.md"), *(path for one in FOLDERS for path in sorted(one.rglob("*.md")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in Guide(page.read_text(encoding="utf-8")).links():
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in Guide(target.read_text(encoding="utf-8")).headings(), link
