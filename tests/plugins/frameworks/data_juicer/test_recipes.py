"""data-juicer's own command runs both recipes: what is left is what our own filters leave."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.frameworks.data_juicer import write_recipes

ASKED_FOR = "COMPOSER_MESH_TEST_DATA_JUICER"
GOOD = "The warehouse in Lisbon holds {} boxes of blue pens."
SHORT, SPECIAL = "no {}", "@@ ## $$ %% && ** (( )) {} !! ??"


@pytest.fixture(autouse=True, scope="session")
def asked_for() -> None:
    if not os.environ.get(ASKED_FOR):
        pytest.skip(f"needs data-juicer in a venv: run `nox -s data-juicer`, or set {ASKED_FOR}")


def rows() -> list[dict[str, Any]]:
    """40 good pairs, and 10 each with a short or a special text on either side."""
    kinds = [(GOOD, GOOD)] * 40
    kinds += [(SHORT, GOOD)] * 10 + [(GOOD, SHORT)] * 10 + [(GOOD, SPECIAL)] * 10
    return [
        {
            "pair_id": str(number),
            "chosen_text": one.format(number),
            "rejected_text": two.format(-number),
        }
        for number, (one, two) in enumerate(kinds)
    ]


def test_two_chained_recipes_leave_the_good_pairs_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "pairs.jsonl", tmp_path / "clean.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    command = Path(os.environ[ASKED_FOR]).absolute() / "dj-process"
    for recipe in write_recipes(tmp_path / "recipes", source, target):
        ended = subprocess.run(
            [str(command), "--config", str(recipe)],
            cwd=tmp_path,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "DATA_JUICER_CACHE_HOME": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
    kept = [json.loads(line)["pair_id"] for line in target.read_text().splitlines()]
    assert sorted(map(int, kept)) == list(range(40))
