"""The Tinker SDK against `composer-mesh serve`: `nox -s tinker`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ASKED_FOR = "COMPOSER_MESH_TEST_TINKER"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[3] / "unit" / "helpers"))

from served_process import Sdk, Server  # noqa: E402


@pytest.fixture(scope="session")
def sdk() -> Sdk:
    """The interpreter of an environment with a version of the SDK."""
    folder = os.environ.get(ASKED_FOR)
    if not folder:
        pytest.skip(f"installs the Tinker SDK: run `nox -s tinker`, which sets {ASKED_FOR}")
    return lambda version: Path(folder).absolute() / version / "bin" / "python"


@pytest.fixture
def serve(sdk: Sdk, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers on folders of this test; none survives it."""
    started: list[Server] = []

    def start(*more: str) -> Server:
        server = Server(tmp_path / f"served-{len(started)}", *more)
        server.start()
        started.append(server)
        return server

    yield start
    for one in started:
        if one.process is not None and one.process.poll() is None:
            one.kill()
