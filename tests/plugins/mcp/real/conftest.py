"""Calls of real MCP servers from npm and PyPI: `nox -s mcp`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ASKED_FOR = "COMPOSER_MESH_TEST_MCP"

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))


@pytest.fixture(scope="session")
def installed() -> Path:
    """The environment of the session, in which the servers of npm and PyPI are installed."""
    folder = os.environ.get(ASKED_FOR)
    if not folder:
        pytest.skip(f"installs servers from npm and PyPI: run `nox -s mcp`, which sets {ASKED_FOR}")
    return Path(folder).absolute()
