"""Calls of real MCP servers from npm and PyPI: `make test-mcp`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ASKED_FOR = "COMPOSER_MESH_TEST_MCP"

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "helpers"))


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder with `node_modules` and `venv`, in which the servers are installed."""
    folder = os.environ.get(ASKED_FOR)
    if not folder:
        pytest.skip(
            f"installs servers from npm and PyPI: run `make test-mcp`, which sets {ASKED_FOR}"
        )
    return Path(folder).absolute()
