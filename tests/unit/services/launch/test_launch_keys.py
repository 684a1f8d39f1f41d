"""What a launch puts into commands and scripts: names of keys at most, and workers without them."""

from __future__ import annotations

from pathlib import Path

from composer_mesh.configs.schema import Config
from composer_mesh.services.launch.orders import worker_command

TEACHER = {
    "name": "far",
    "kind": "openai",
    "base_url": "https://x.test/v1",
    "model": "m",
    "api_key_env": "KEY_X",
}
CONFIG = {"run": {"name": "t", "steps": 1}, "data": {"kind": "toolbox"}}
PAID = {
    "beta": 0.1,
    "teachers": [TEACHER],
    "ask": 1,
    "agreement_threshold": 1,
    "budget": {"usd": 1},
}


def test_a_worker_inherits_no_key_from_where_it_is_launched() -> None:
    config = Config.model_validate(CONFIG | {"replay": PAID})
    words = worker_command("python", config, Path("/run/hosts"), None)
    assert words[:3] == ["env", "-u", "KEY_X"]
    assert words[3:8] == ["python", "-P", "-m", "composer_mesh", "worker"]


def test_a_worker_of_a_run_without_keys_is_started_directly() -> None:
    words = worker_command("python", Config.model_validate(CONFIG), Path("/run/hosts"), None)
    assert words[:5] == ["python", "-P", "-m", "composer_mesh", "worker"]
