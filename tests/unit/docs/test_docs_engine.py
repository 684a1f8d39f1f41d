"""The page about the embedded engine names what exists."""

from __future__ import annotations

from guides import Guide, names_in_code

PAGE = Guide.read("engine.md")


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() == set()
