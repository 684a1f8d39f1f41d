"""Words that puzzle readers are in no page, docstring, comment or message of the project."""

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.configs import plugins
from composer_mesh.configs.reference import keys
from composer_mesh.configs.schema import Config
from composer_mesh.services.commands.parser import Command

PLAIN = {
    "told": "reported, stated or informed",
    "beside": "next to, together with, or while something runs",
    "goes on": "continues",
    "what is left": "the rest",
    "asked": "queried, requested or called",
}
"""Each word with what to write in its place."""
PACKAGE = (
    *("configs", "planning", "losses", "rollouts", "channels", "tasks"),
    *("mesh", "actors", "services", "plugins"),
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs")
FOLDERS = (*PAGES, *PACKAGE, "examples", "benchmarks")
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
LONG = 25
"""Words of the longest sentence."""


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


def test_no_sentence_of_a_page_is_long() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [one for page in pages for one in long_sentences(page.read_text(encoding="utf-8"))]
    assert found == []


def long_sentences(page: str) -> list[str]:
    """The sentences of more than `LONG` words, without blocks, tables, headings and targets."""
    prose = NO_PROSE.sub("", page)
    prose = re.sub(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n\n", prose)
    plain = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose))
    ends = r"\n\s*\n|(?<=[.!?:;])\s+(?=[A-Z*(])"
    return [one for one in re.split(ends, plain) if len(one.split()) > LONG]


@pytest.mark.plugins
def test_no_explanation_help_text_or_message_is_long_or_puzzles() -> None:
    """A message also ends a sentence before its repair, which follows a colon in lower case."""
    explained = [(key.path, one) for key in keys(Config) for one in re.split(END, key.text)]
    helped = [(name, one) for name, text in helps() for one in re.split(END, text)]
    said = [(place, one) for place, text in messages() for one in re.split(CLAUSE, text)]
    found = [*explained, *helped, *said]
    assert [each for each in found if len(re.sub(r"`[^`]*`", "X", each[1]).split()) > LONG] == []
    puzzling = re.compile(rf"\b({'|'.join(PLAIN.keys() - {'asked'})})\b", re.IGNORECASE)
    assert [each for each in found if puzzling.search(each[1])] == []


END, CLAUSE = r'(?<=[.!?:;])\s+(?=[A-Z*("])', r"\n|(?<=[.!?:;])\s+"
NO_MESSAGE = re.compile(r"\s*(CREATE|INSERT|UPDATE|SELECT|DELETE|import|def) |(.*\n){3}")


def helps() -> Iterator[tuple[str, str]]:
    """The help of each command and option."""
    for name, one in plugins.own("commands").items():
        command: Command = one.load()
        parser = argparse.ArgumentParser()
        command.add(parser)
        yield name, command.about
        yield from ((f"{name} {action.dest}", action.help or "") for action in parser._actions)


def messages() -> Iterator[tuple[str, str]]:
    """The texts of the package that are neither docstrings, scripts nor for models."""
    for folder in PACKAGE:
        for path in (ROOT / folder).rglob("*.py"):
            if path.relative_to(ROOT).as_posix() not in (*MODELS_READ, "tasks/judges.py"):
                module = ast.parse(path.read_text(encoding="utf-8"))
                for line, text in texts_of(module):
                    if not NO_MESSAGE.match(text):
                        yield f"{path.relative_to(ROOT)}:{line}", text


def texts_of(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Constant(value=str(text)):
            yield node.lineno, text
        case ast.JoinedStr(values=values):
            yield (
                node.lineno,
                "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in values),
            )
        case _:
            for child in ast.iter_child_nodes(node):
                yield from texts_of(child)
