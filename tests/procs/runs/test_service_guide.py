"""The guide to services says what is: its code runs as it stands, in its order."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gated_provider import GatedProvider

from composer_mesh.mesh.processes import is_alive
from composer_mesh.services.service import Service

PAGE = (Path(__file__).parents[3] / "docs" / "service.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
async def script() -> AsyncIterator[dict[str, Any]]:
    """The names of a script, whose classes children get by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    yield names
    if isinstance(pool := names.get("pool"), Service):
        await pool.close()


async def test_the_code_of_the_guide_runs(script: dict[str, Any], tmp_path: Path) -> None:
    assert len(BLOCKS) > 5
    pids: set[int] = set()
    async with GatedProvider() as provider:
        provider.gate.set()
        for block in BLOCKS:
            text = block.replace("http://localhost:8000/v1", provider.base_url)
            # Runs start in parallel, in the folder of this process, which therefore stays.
            text = text.replace('folder="teachers"', f"folder={str(tmp_path / 'teachers')!r}")
            code = compile(text, "service.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if (running := eval(code, script)) is not None:
                await running
            pids |= {line["pid"] for line in script["pool"].status()}
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
