"""Words that puzzle readers are in no page, docstring, comment or message of the project."""

import re
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

PLAIN = {
    "told": "reported, stated or informed",
    "beside": "next to, together with, or while something runs",
    "goes on": "continues",
    "what is left": "the rest",
    "asked": "queried, requested or called",
}
"""Each word with what to write in its place."""
FOLDERS = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "docs",
        "configs",
        "planning",
        "losses",
        "rollouts",
        "channels",
        "tasks",
    ),
    *("mesh", "actors", "services", "plugins", "examples", "benchmarks"),
)
ALLOWED = {
    "asked": r"\.asked\b|\basked([=:]| TEXT| \()|[`\"']asked[`\"']|(FROM|INTO) asked",
    "beside": r"\bbeside_\w+",
}
"""Names that are stored or public."""
MODELS_READ = (
    "plugins/code_tasks/monitor.py",
    "plugins/long_tasks/home_devices.py",
    "plugins/task_packages/bfcl/task.py",
    "plugins/task_packages/textarena.py",
)
"""Files with texts for models, which a run's results depend on."""
NO_PROSE = re.compile(
    r"^( *)```.*?^\1```$|<!--.*?-->|^ *[|#!][^\n]*$|^    [^\n]*$", re.MULTILINE | re.DOTALL
)
LONG, MOST_LONG = 25, 246
"""Words of a long sentence, and how many of those the pages may have: lower it with each edit."""


def lines_of(word: str) -> list[str]:
    grep = ["git", "grep", "-nwi", "-e", word, "--", *(f"{one}" for one in FOLDERS)]
    found = subprocess.run(grep, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [line for line in found.splitlines() if Path(line.partition(":")[0]).suffix != ".json"]


@pytest.mark.parametrize("word", PLAIN)
def test_a_puzzling_word_is_in_no_prose(word: str) -> None:
    left = [
        line
        for line in lines_of(word)
        if not line.startswith(MODELS_READ)
        and re.search(rf"\b{word}\b", re.sub(ALLOWED.get(word, r"(?!)"), "", line), re.IGNORECASE)
    ]
    assert left == [], f"write {PLAIN[word]} in place of {word!r}"


def test_few_sentences_of_the_pages_are_long() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [one for page in pages for one in long_sentences(page.read_text(encoding="utf-8"))]
    assert len(found) <= MOST_LONG


def long_sentences(page: str) -> list[str]:
    """The sentences of more than `LONG` words, without blocks, tables, headings and targets."""
    prose = NO_PROSE.sub("", page)
    prose = re.sub(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n\n", prose)
    plain = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose))
    ends = r"\n\s*\n|(?<=[.!?:;])\s+(?=[A-Z*(])"
    return [one for one in re.split(ends, plain) if len(one.split()) > LONG]
