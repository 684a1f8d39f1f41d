"""What process tests share, and the boxes of a module's `folder`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tests import *  # noqa: F403

from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.tasks.errors import UnusableTask


@pytest.fixture(scope="module")
def containers(folder: Path) -> Iterator[Any]:
    """Containers of this machine; a test says why there are none."""
    try:
        opened = open_containers("bubblewrap", cache=str(folder / "cache"))
    except UnusableTask as error:
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())
