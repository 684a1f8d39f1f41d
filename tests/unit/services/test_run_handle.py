"""Values of runs from Python: classes by their files, and refusals that say what to write."""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from composer_mesh import ConfigError, Task, train
from composer_mesh.services.run_handle import _config

PRESET = ROOT / "configs" / "quickstart.toml"
NO_REPLAY = {"replay.beta": 0}


class Listed(Task):
    """A task of this file."""


def test_a_class_is_named_by_its_file() -> None:
    path = f"{Path(__file__)}:Listed"
    assert _config(PRESET, {"data.task": Listed, **NO_REPLAY}).data.task == path
    table: dict[str, Any] = {"run": {"name": "r", "steps": 1}, "data": {"task": Listed}}
    assert _config(table, {"run.steps": 2}).data.task == path
    assert table["run"]["steps"] == 1


def test_a_class_of_a_notebook_cell_says_where_to_write_it(monkeypatch: Any) -> None:
    cell = types.ModuleType("cell")
    monkeypatch.setitem(sys.modules, "cell", cell)
    exec("class Cell: pass", vars(cell))
    with pytest.raises(ConfigError, match=r"notebook cell .* %%writefile my_task\.py .*:Cell'"):
        train(PRESET, {"data.task": cell.Cell})


def test_a_class_inside_a_function_and_a_function_say_what_to_write() -> None:
    class Inner(Task):
        """A class that no import reaches."""

    with pytest.raises(ConfigError, match="class Inner inside another name"):
        train(PRESET, {"data.task": Inner})
    with pytest.raises(ConfigError, match=r"loss\.import_path is the function 'dumps'"):
        train(PRESET, {"loss.import_path": json.dumps})


def test_a_script_that_a_run_imports_starts_no_further_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ModuleSpec("composer_mesh.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    with pytest.raises(RuntimeError, match='below `if __name__ == "__main__":`'):
        train(PRESET)
