"""The notebook of examples/, run as Jupyter runs it: cell by cell in one loop."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from live_run import ENDLESS, SHORT
from repository import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


async def shown(cell: dict[str, Any], names: dict[str, Any]) -> Any:
    """Run a cell, which may await; return the value of its last line, as Jupyter shows it."""
    tree = ast.parse(source(cell))
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name("_shown", ast.Store())], last.value)
    code = compile(ast.fix_missing_locations(tree), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names["_shown"] = None
    if inspect.iscoroutine(running := eval(code, names)):
        await running
    return names["_shown"]


def test_the_notebook_has_no_outputs() -> None:
    assert [cell["outputs"] for cell in CODE] == [[]] * len(CODE)
    assert [cell["execution_count"] for cell in CODE] == [None] * len(CODE)


async def test_the_notebook_trains_and_shows_the_run(
    tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for cell in CODE:
        values[source(cell)] = await shown(cell, names)
        if "parameters" in cell["metadata"].get("tags", []):  # as papermill puts its own after it
            names["changes"] |= {**SHORT, **ENDLESS, "policy.cache_dir": policy_cache}
    by_start = {text.partition("\n")[0]: value for text, value in values.items()}
    run = names["run"]
    assert by_start["tree = run.tree()"]
    assert by_start["run.stop()"] == 0
    assert not run.live
    table = by_start['run.metrics()[["step", "reward/mean", "loss/total", "rollouts/error_sites"]]']
    assert list(table["step"])[:2] == [1, 2]
    assert "run_stopped" in by_start['[event["event"] for event in run.events()]']
    messages, reward = by_start["trace = next(run.rollouts())"]
    assert messages[0][0] in ("system", "user")
    assert reward == names["trace"].reward
