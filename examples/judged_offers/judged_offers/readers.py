"""Readers who like to be thanked, and say so after the rollouts were trained on."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from judged_offers.task import THANKS

COMMAND = [sys.executable, "-P", "-m", "composer_mesh"]
BONUS = 0.5


def opinion(trace: dict[str, Any]) -> float:
    """The reward of a rollout once its readers have answered: the judge's and their own."""
    answer = trace["messages"][-1]["content"]
    return float(trace["rewards"]["clear"] + BONUS * (THANKS in answer))


def post_opinions(run: Path, known: set[str]) -> int:
    """Post the readers' opinions of rollouts that are new; return how many."""
    with tempfile.TemporaryDirectory() as folder:
        export = [*COMMAND, "traces", str(run), "export", "--split", "train"]
        export += ["--format", "jsonl", "--output", f"{folder}/out"]
        if subprocess.run(export, capture_output=True, check=False).returncode:
            return 0  # nothing is stored yet
        lines = Path(folder, "out", "traces.jsonl").read_text().splitlines()
        new = [one for one in map(json.loads, lines) if one["trace_id"] not in known]
        if not new:
            return 0
        posts = Path(folder, "posts.jsonl")
        posts.write_text(
            "".join(
                json.dumps({"trace_id": one["trace_id"], "reward": opinion(one)}) + "\n"
                for one in new
            )
        )
        post = [*COMMAND, "reward", str(run), "--file", str(posts), "--source", "readers"]
        subprocess.run(post, check=True)
    known |= {one["trace_id"] for one in new}
    return len(new)
