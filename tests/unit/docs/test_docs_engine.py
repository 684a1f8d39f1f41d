"""The page about the embedded engine names what exists, and its links lead somewhere."""

from __future__ import annotations

from guides import ROOT, Guide, names_in_code

PAGE = Guide.read("engine.md")


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() == set()


def test_every_link_on_the_page_leads_somewhere() -> None:
    for link in PAGE.links():
        page, _, part = link.partition("#")
        assert not page or (ROOT / "docs" / page).exists(), link
        assert not part or f"# {part.replace('-', ' ')}\n" in PAGE.text.lower(), link
