"""docs/serve.md says what is: every option, loss and SDK version."""

import ast
import re

from guides import Guide
from repository import ROOT

from composer_mesh.plugins.tinker import client
from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES
from composer_mesh.services.commands.parser import make_parser

PAGE = Guide.read("serve.md")


def test_the_page_names_every_option_and_no_other() -> None:
    (commands,) = (one for one in make_parser()._actions if one.dest == "command")
    known = {word for one in commands.choices["serve"]._actions for word in one.option_strings}
    table = "\n".join(line for line in PAGE.text.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"--[a-z][a-z-]*", table))
    assert named == {one for one in known if one.startswith("--")} - {"--help"}


def test_the_page_names_every_loss() -> None:
    (row,) = (line for line in PAGE.text.splitlines() if line.startswith("| `forward`"))
    assert set(re.findall(r"`([a-z_]+)`", row)) - {"forward", "forward_backward"} == {
        *CLIENT_LOSSES
    }


def test_the_versions_of_the_page_are_those_that_are_tested() -> None:
    versions = re.search(r"SDKs\s+(\S+) to (\S+) are served", PAGE.text)
    assert versions is not None
    rule = next(
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if line.startswith("test-tinker:")
    )
    assert re.findall(r"TINKER\)/([0-9.]+)/", rule) == [*versions.groups()]


def test_the_python_of_the_page_imports_public_names_of_the_client_library() -> None:
    (block,) = PAGE.blocks("python")
    (imported,) = [one for one in ast.parse(block).body if isinstance(one, ast.ImportFrom)]
    assert imported.module == "composer_mesh.plugins.tinker.client"
    assert {alias.name for alias in imported.names} <= set(client.__all__)
