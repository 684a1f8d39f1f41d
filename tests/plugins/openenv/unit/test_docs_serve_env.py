"""docs/serve-env.md says what is: every option and route, and its Python runs."""

import re
from typing import Any

from guides import Guide

from composer_mesh.plugins.openenv.server.describe import ROUTES
from composer_mesh.plugins.openenv.server.mcp import VERSIONS
from composer_mesh.services.commands.parser import make_parser

PAGE = Guide.read("serve-env.md")


def test_the_page_names_every_option_and_no_other() -> None:
    (commands,) = (one for one in make_parser()._actions if one.dest == "command")
    known = {word for one in commands.choices["serve-env"]._actions for word in one.option_strings}
    table = "\n".join(line for line in PAGE.text.splitlines() if line.startswith("| `--"))
    named = set(re.findall(r"--[a-z][a-z-]*", table))
    assert named == {one for one in known if one.startswith("--")} - {"--help"}


def test_the_page_names_every_route_and_the_versions_of_mcp() -> None:
    table = PAGE.text[PAGE.text.index("| route |") : PAGE.text.index("`reset` takes")]
    for route in ROUTES:
        assert f"{route.rpartition('/')[2]}`" in table, route
    assert VERSIONS[0] in PAGE.text
    assert VERSIONS[-1] in PAGE.text


def test_the_python_of_the_page_runs() -> None:
    found: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["factory"].name == "MyTask"
