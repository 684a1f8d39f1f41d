"""What a launch puts into commands and scripts: names of keys at most, and workers without them."""

from __future__ import annotations

from pathlib import Path

from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.services.launch.workers import worker_command

QUICKSTART = ROOT / "configs" / "quickstart.toml"
TEACHER = (
    '{name="NAME", kind="openai", base_url="http://x/v1", model="m", api_key_env="KEY_NAME",'
    "prompt_usd_per_million=1, completion_usd_per_million=1}"
)
PAID = (
    f"replay.teachers=[{TEACHER.replace('NAME', 'X')}, {TEACHER.replace('NAME', 'Y')}]",
    "replay.budget.usd=1",
    "replay.ask=2",
)
ROSTER = Path("/run/hosts")


def test_a_worker_inherits_no_key_from_where_it_is_launched() -> None:
    words = worker_command("python", load_config(QUICKSTART, PAID), ROSTER, None)
    assert words[:5] == ["env", "-u", "KEY_X", "-u", "KEY_Y"]
    assert words[5:10] == ["python", "-P", "-m", "composer_mesh", "worker"]


def test_a_worker_of_a_run_without_keys_is_started_directly() -> None:
    words = worker_command("python", load_config(QUICKSTART), ROSTER, None)
    assert words[:5] == ["python", "-P", "-m", "composer_mesh", "worker"]
