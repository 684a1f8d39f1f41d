"""Broken and hostile model folders: one error each, nothing hangs, nothing is run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from broken_files import Breaker, watched
from safetensors.numpy import save_file

from composer_mesh.actors.engines.vllm_settings import AttentionShape
from composer_mesh.configs.policy import ModelSizes, PolicyConfig
from composer_mesh.planning.model_folder import UnfitModelFolder, check_model_folder
from composer_mesh.planning.model_sizes import UnknownSizes, decoder_weights, sizes_of

SIZES = ModelSizes(
    model_type="qwen3",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=40,
    tie_word_embeddings=True,
)


def write_model(folder: Path, *, index: bool) -> None:
    """A tiny decoder, its weights in one file or in two."""
    folder.mkdir()
    weights = {f"model.{n}": np.zeros(shape, np.float32) for n, shape in decoder_weights(SIZES)}
    names = sorted(weights)
    if index:
        files = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: weights[n] for n in names if files[n] == file}, folder / file)
        told = {"metadata": {"total_size": 1}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    else:
        save_file(weights, folder / "model.safetensors")
    config = {**SIZES.model_dump(), "architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for name in ("one", "two"):
        write_model(root / name, index=name == "two")
        check_model_folder(root / name)
    return [root / "one", root / "two"]


def accepted(folder: Path) -> bool:
    """Whether a folder passes the checks, and what reads it next can read it."""
    try:
        check_model_folder(folder)
        sizes_of(PolicyConfig(path=folder))
        AttentionShape.of_folder(folder)
    except (UnfitModelFolder, UnknownSizes):
        return False
    return True


def test_no_broken_model_folder_raises_hangs_or_runs_code(
    models: list[Path], tmp_path: Path, cases: Callable[[int], Iterator[int]]
) -> None:
    refused, marker = 0, tmp_path / "attacked"
    for seed in cases(500):
        rng, folder = random.Random(seed), tmp_path / "policy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(rng.choice(models), folder)
        for _ in range(rng.randint(1, 2)):
            Breaker(rng, marker).break_one(folder)
        with watched() as run:
            refused += not accepted(folder)
        assert not run, (seed, run)
        assert not marker.exists(), seed
    assert refused > 200
