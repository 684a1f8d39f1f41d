"""The model card says what a run was, and nothing of its machine or its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from unit_tests import BuildConfig

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.load import dump_toml
from composer_mesh.plugins.hub.model_card import escaped, model_card

HOSTILE = "</p><script>x</script> [a](http://evil) ![i](javascript:0)\n# *b* `c` www.evil"


def card(build_config: BuildConfig, run: Path, **sections: object) -> str:
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(dump_toml(build_config(**sections)))
    rows = [
        {"step": 1, "loss/policy": 0.1, "tokens/trained": 40, "rollouts/count": 4},
        {"step": 2, "loss/policy": 0.1, "loss/sdpo": 0.2, "tokens/trained": 2},
        {"step": 3, "loss/policy": 0.1, "loss/sdpo": 0.2, "tokens/trained": 1000},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = [{"step": n, "success": n / 4, "episodes": 8} for n in (0, 2, 3)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return model_card(run, Checkpoint(2, run), "acme/up")


def test_a_card_is_about_its_checkpoint(build_config: BuildConfig, tmp_path: Path) -> None:
    path = f"acme/tiny@{'a' * 40}"
    text = card(build_config, tmp_path / "run", policy={"path": path, "max_context": 512})
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "acme/tiny"
    assert f"from `acme/tiny` at commit `{'a' * 40}`" in text
    assert "2 optimizer steps on 42 tokens of 4 rollouts" in text
    assert "policy (2), sdpo (1)" in text
    assert "| step 0 | 0.0% |" in text
    assert "| step 2 | 50.0% |" in text
    assert "step 3" not in text


def test_a_card_has_no_path_no_address_and_no_name_of_a_key(
    build_config: BuildConfig, tmp_path: Path
) -> None:
    teachers = [
        {"name": f"t{n}", "kind": "openai", "model": "secret-model", "max_usd": 1.0}
        | {"base_url": "https://secret.example/v1", "api_key_env": "SECRET_KEY"}
        for n in range(3)
    ]
    text = card(
        build_config,
        tmp_path / "run",
        policy={"path": str(tmp_path / "models" / "mine"), "max_context": 512},
        data={"task": "a.b:Mine", "path": "/secret/rows.jsonl", "options": {"token": "secret"}},
        generator={"max_new_tokens": 64, "vllm": {"engine_args": {"download_dir": "/secret"}}},
        replay={"teachers": teachers, "budget": {"usd": 1.0}},
    )
    assert str(tmp_path) not in text
    assert "secret" not in text.lower()
    assert "the model mine, which is on no hub" in text
    assert "base_model" not in text.split("---")[1]


def test_texts_of_others_are_no_markup() -> None:
    text = escaped(HOSTILE)
    for part in ("<", "\n", "](", "://", "www."):
        assert part not in text
    assert len(escaped("x" * 1_000_000)) == 200


def test_a_task_of_a_hostile_name_is_escaped(build_config: BuildConfig, tmp_path: Path) -> None:
    text = card(build_config, tmp_path / "run", data={"task": "[x](http://evil):</p><script>"})
    assert "<script>" not in text
    assert "](http" not in text


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_a_card_of_a_run_with_a_damaged_file_is_refused(
    name: str, build_config: BuildConfig, tmp_path: Path
) -> None:
    card(build_config, tmp_path / "run")
    (tmp_path / "run" / name).write_text("[[[\n")
    with pytest.raises(Exception, match=f"{name}") as refused:
        model_card(tmp_path / "run", Checkpoint(2, tmp_path), "acme/up")
    assert type(refused.value).__name__ in ("ConfigError", "RunDirectoryError")
