"""The hint writer in real processes: its actor, its cache, and whole runs with its words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from live_run import launched

from composer_mesh.actors.expert_server import ExpertServerActor
from composer_mesh.actors.experts.http import TOKEN_ENV, new_token
from composer_mesh.actors.panel_actors import HintWriterActor
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.actors.provider.errors import ProviderAuthError
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.hints import HintRequest
from composer_mesh.services import service
from composer_mesh.services.replay.teacher_settings import (
    HINT_LEDGER_FILE,
    HINTS_FILE,
    hint_settings,
)
from composer_mesh.services.run.pools import MeshHintWriter

CONFIG = Config.model_validate(
    {
        "run": {"name": "t", "seed": 4, "steps": 1},
        "data": {"task": "toolbox"},
        "sdpo": {"alpha": 0.1, "hints": {"writer": "llm", "llm": {"kind": "builtin"}}},
    }
)


def question(text: str) -> HintRequest:
    content = f'{{"error_kind": "no_answer", "plain_hint": "{text}"}}'
    return HintRequest([{"role": "user", "content": content}])


async def test_the_builtin_writer_words_hints_and_remembers_them(
    host: MeshHost, tmp_path: Path
) -> None:
    token = new_token()
    experts = await host.spawn("experts", ExpertServerActor)
    url = await experts.call("load", CONFIG, [], token)
    pool = await service.spawn(HintWriterActor, n=1, host=host, name="hint_writer")
    writer = MeshHintWriter(pool, CONFIG, Keys({TOKEN_ENV: token}))
    await writer.load(url, tmp_path)
    asked = [question("Go on."), question("Look."), question("Go on.")]
    first = await writer.write(asked)
    assert [reply.text for reply in first] == [
        "Mind the no answer. Go on.",
        "Mind the no answer. Look.",
        "Mind the no answer. Go on.",
    ]
    assert [reply.origin for reply in first] == ["llm", "llm", "cached"]
    await writer.load(url, tmp_path)  # as a resumed run does
    await experts.call("aclose")
    again = await writer.write([*asked, question("New.")])
    assert [reply.origin for reply in again] == ["cached", "cached", "cached", "none"]
    about = await writer.pool.describe()
    assert about["replies"] == {"cached": 3, "server": 1}
    assert (about["kind"], about["activity"]) == ("hint_writer", "idle")
    assert (await writer.pool.report()).run.requests == 3
    assert (tmp_path / HINTS_FILE).is_file()
    assert (tmp_path / HINT_LEDGER_FILE).is_file()
    await writer.pool.aclose()


async def test_a_missing_key_is_found_by_load(host: MeshHost, tmp_path: Path) -> None:
    actor = await host.spawn("hint_writer", HintWriterActor)
    llm = {"kind": "openai", "base_url": "https://x.test/v1", "model": "m"}
    sdpo = {"hints": {"writer": "llm", "llm": {**llm, "api_key_env": "NO_SUCH_KEY"}}}
    config = Config.model_validate({**CONFIG.model_dump(include={"run", "data"}), "sdpo": sdpo})
    with pytest.raises(ProviderAuthError, match="NO_SUCH_KEY is not set"):
        await actor.call("load", hint_settings(config, "", tmp_path), Keys())
    with pytest.raises(RuntimeError, match="the hint_writer is not loaded: call load first"):
        await actor.call("write", [question("x")])


def counted(steps: list[dict[str, Any]], key: str) -> int:
    return sum(step[f"hints/{key}"] for step in steps)


def test_a_run_that_repeats_another_pays_for_no_hint(tmp_path: Path, policy_cache: Path) -> None:
    settings = {
        "run.steps": 2,
        "replay.beta": 0,
        "schedule.max_lag": 0,
        "eval.episodes": 2,
        "sdpo.hints.writer": "llm",
        "sdpo.hints.sources": '["sibling", "error", "feedback"]',
        "sdpo.hints.llm": f'{{kind="builtin", cache="{tmp_path / "hints"}"}}',
    }
    runs = []
    for name in ("first", "second"):
        with launched(tmp_path / name, policy_cache, settings) as run:
            assert run.wait() == 0, run.stderr
        assert "hint_writer" in run.pids()
        runs.append(run.objects("metrics.jsonl"))
    first, second = runs
    assert counted(first, "llm") > 0
    assert counted(second, "llm") == counted(second, "requests") == 0
    assert counted(second, "cached") == counted(first, "llm") + counted(first, "cached")
    for steps in runs:
        assert counted(steps, "usd") == counted(steps, "template") == 0
        for step in steps:
            kinds = ("llm", "cached", "fallback", "sibling", "feedback")
            assert sum(step[f"hints/{kind}"] for kind in kinds) == step["sdpo/views"]


async def test_the_writer_does_not_load_torch() -> None:
    program = (
        "import sys; import composer_mesh.actors.panel_actors; sys.exit('torch' in sys.modules)"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await child.wait() == 0


def test_the_config_holds_no_token() -> None:
    assert TOKEN_ENV not in CONFIG.model_dump_json()
