"""Does what its standard input lists with configs, as commands do; writes a JSON line for each.

A process of its own, since huggingface_hub reads its settings when it is imported.

    {"set": [overrides], "download": true}   ->   {"policy", "folder", "files", "data", "remarks"}
    {"rows": path}                           ->   {"rows"}
    {"read": id}                             ->   {"total", "text"}: from_pretrained
    {"push": [words]}                        ->   {"status", "out", "err"}
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.services.checks.accepting import check_policy_files
from composer_mesh.services.checks.hub import download_models, hub_remarks, with_models
from composer_mesh.services.cli import main
from composer_mesh.tasks.errors import TaskError
from composer_mesh.tasks.rows import read_rows


def done(step: dict[str, Any], config: Path) -> dict[str, Any]:
    """Return what a step gives."""
    if "rows" in step:
        return {"rows": [dict(row) for row in read_rows(step["rows"])]}
    if "read" in step:
        return read(step["read"])
    if "push" in step:
        return pushed(step["push"])
    found = with_models(load_config(config, step["set"]))
    check_policy_files(found)
    remarks = list(hub_remarks(found)) if step.get("remarks") else []
    if step.get("download") and download_models(found):
        check_policy_files(found)
    folder = found.policy.folder
    files = [] if folder is None else sorted(one.name for one in folder.iterdir())
    named = {"policy": str(found.policy.path), "data": str(found.data.path)}
    return {**named, "folder": str(folder), "files": files, "remarks": remarks}


def pushed(words: list[str]) -> dict[str, Any]:
    """Run the command `push`; return its status and what it wrote."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(["push", *words])
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def read(name: str) -> dict[str, Any]:
    """Load a model and its tokenizer as their users do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name)
    turn = [{"role": "user", "content": "hello"}]
    text = AutoTokenizer.from_pretrained(name).apply_chat_template(turn, tokenize=False)
    total = sum(float(weights.double().sum()) for weights in model.parameters())
    return {"total": total, "text": text}


def do_all() -> None:
    """Do each line of the standard input."""
    for line in sys.stdin:
        try:
            answer = done(json.loads(line), Path(sys.argv[1]))
        except (ConfigError, TaskError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    do_all()
