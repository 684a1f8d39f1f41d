"""What pages name is in the code; pages with names of other packages have tests of their own."""

from __future__ import annotations

import pytest
from guides import ROOT, Guide, names_in_code

OTHERS = {
    *("ablation", "agents", "areal", "channels", "chat-templates", "cluster", "code-tasks-making"),
    *("composer-replication", "how-it-works/rollout", "hub", "islands", "losses", "openenv"),
    *("plugins", "prime-rl", "python", "resume", "sandbox", "sdpo-hints", "serve", "supervision"),
    *("task-packages", "tasks", "tests", "threat-model", "trainer", "trl", "verifiers", "verl"),
    *("workflows", "decisions/0001-layout-and-links", "decisions/0016-hosts-on-a-lease"),
    *("decisions/0018-connections-of-other-users", "decisions/0031-our-own-decode-step"),
    "decisions/0022-torchft-below-our-outer-optimizer",
}
"""Pages with names of other packages, of examples, of metrics or of tests."""
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", sorted(PAGES - OTHERS))
def test_every_name_of_a_page_is_in_the_code(page: str) -> None:
    assert Guide.read(f"{page}.md").names() - names_in_code() == set()


def test_each_other_page_is_there() -> None:
    assert OTHERS <= PAGES
