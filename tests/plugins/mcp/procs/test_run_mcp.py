"""A whole run whose agents have the tools of an MCP server over stdio."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from live_run import launched

from composer_mesh.configs.load import load_config

SERVER = Path(__file__).parents[1] / "helpers" / "mcp_example_server.py"


def test_a_run_trains_with_the_tools_of_a_server_and_pins_them(
    tmp_path: Path, policy_cache: Path
) -> None:
    program = f"command = {json.dumps(sys.executable)}, args = [{json.dumps(str(SERVER))}]"
    table = (
        f'{{ name = "example", transport = "stdio", {program}, allow = ["add"], '
        'prefix = "far_", start_s = 120.0, call_s = 30.0 }'
    )
    settings = {
        "run.steps": 2,
        "environment.call_s": 200.0,
        "environment.mcp": f"[{table}]",
        "policy.max_context": 1024,
        "trainer.microbatch_tokens": 4096,
    }
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    config = load_config(run.root / "config.toml", [])
    assert [one.name for one in config.environment.mcp[0].tools or ()] == ["add"]
    assert len(run.objects("metrics.jsonl")) == 2
    assert run.traces()
