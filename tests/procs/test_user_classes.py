"""Actor classes of users run wherever they are written: in a module, a script or a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

ACTOR = """
from composer_mesh import MeshActor
from monarch.actor import concurrent_endpoint
import offsets

class Adder(MeshActor):
    @concurrent_endpoint
    async def add(self, number):
        return number + offsets.OFFSET
"""
MAIN = """
import asyncio
from composer_mesh import service

async def main():
    async with await service.spawn(Adder, n=1) as pool:
        print(await pool.add(1))

asyncio.run(main())
"""
CELL = f"""
import sys, types

sys.modules["cell"] = cell = types.ModuleType("cell")
exec({ACTOR!r}, vars(cell))
Adder = cell.Adder
"""


def run(folder: Path, *words: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT / "src"), "PATH": "", "HOME": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=folder, env=env, input=code, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "offsets.py").write_text("OFFSET = 7")
    (scripts / "adders.py").write_text(ACTOR)
    (scripts / "by_module.py").write_text(f"from adders import Adder\n{MAIN}")
    (scripts / "whole.py").write_text(ACTOR + MAIN)
    return tmp_path


@pytest.mark.parametrize("script", ["by_module", "whole"])
def test_an_actor_of_a_script_or_of_a_module_next_to_it_starts(folder: Path, script: str) -> None:
    done = run(folder, f"scripts/{script}.py")
    assert done.stdout == "8\n", done.stderr


def test_an_actor_of_a_notebook_starts(folder: Path) -> None:
    done = run(folder / "scripts", "-", code=ACTOR + MAIN)
    assert done.stdout == "8\n", done.stderr


def test_a_class_of_a_module_without_a_file_says_where_to_write_it(folder: Path) -> None:
    done = run(folder / "scripts", "-", code=CELL + MAIN)
    assert done.returncode == 1
    assert "the module 'cell', which has no file" in done.stderr.splitlines()[-1]
    assert "%%writefile my_actors.py" in done.stderr.splitlines()[-1]
