"""The file of coding tasks that attacks are tried on with the tools of an agent."""

from __future__ import annotations

import json
from pathlib import Path

from code_attacks import TASK


def write_tasks(file: Path) -> Path:
    """Write the attacked task to a file, for training and held out; return the file."""
    row = {
        **{name: getattr(TASK, name) for name in ("name", "sources", "targets", "visible")},
        "fail_to_pass": TASK.fail_to_pass,
        "pass_to_pass": TASK.pass_to_pass,
        "files": {path: text.decode() for path, text in TASK.files.items()},
        "hidden_files": {path: text.decode() for path, text in TASK.hidden_files.items()},
        "cases": [
            {
                "target": one.target,
                "arguments": list(one.arguments),
                "keywords": dict(one.keywords),
                "expected": dict(one.expected),
            }
            for one in TASK.cases
        ],
    }
    rows = [
        {**row, "prompt": "Restore scaled.", "split": "train"},
        {**row, "name": "other", "prompt": "Restore scaled again.", "split": "heldout"},
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return file
