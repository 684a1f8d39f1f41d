"""The page for users of the composer-replication framework: its code runs, its names exist."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guides import Guide, names_in_code

from composer_mesh.plugins.frameworks import composer_replication

PAGE = Guide.read("composer-replication.md")
THEIRS = {"token_clip", "grpo_composer", "loss_fn"}


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_every_name_of_the_module_is_in_the_page() -> None:
    for name in composer_replication.__all__:
        if name not in ("ComposeLossResult", "DPOPair", "NormalizedDPOPair"):
            assert name in PAGE.text, name


def test_the_python_of_the_page_runs(
    build_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    found: dict[str, Any] = {
        "model": build_model(1),
        "batch": {"input_ids": ids, "response_mask": torch.tensor([[0, 1, 1, 1]])},
    }
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["rows"][0]["chosen"] == [{"role": "assistant", "content": "6 times 7 is 42."}]
    assert all(path.is_file() for path in found["recipes"])
