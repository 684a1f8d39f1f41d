"""Run directories with traces to replay, made without a model: a byte is a token.

And teachers for them: paid ones that know the task, behind a transport.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from scripted_provider import KEY, ScriptedProvider

from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn, trace_to_json
from composer_mesh.services.directory.claim import sign
from composer_mesh.services.store.records import RunRecords
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

COST = 0.0001
BUILTIN: list[dict[str, Any]] = [
    {"name": "careful", "kind": "builtin"},
    {"name": "ordinary", "kind": "builtin", "error_rate": 0.2},
    {"name": "hasty", "kind": "builtin", "error_rate": 0.4},
]
ENVIRON = {"TEST_KEY": KEY}


def paid(*names: str) -> list[dict[str, Any]]:
    """Teachers whose longest answer costs a hundred times what they charge."""
    return [
        {
            "name": name,
            "kind": "openai",
            "base_url": "https://teacher.test/v1",
            "model": f"model-of-{name}",
            "api_key_env": "TEST_KEY",
            "max_tokens": 100,
            "prompt_usd_per_million": 1.0,
            "completion_usd_per_million": 80.0,
        }
        for name in names
    ]


def knowing(task: ToolboxTask, cost: float = COST) -> ScriptedProvider:
    """A provider whose models all know the right action."""

    def say(body: dict[str, Any]) -> httpx.Response:
        message = assistant_message(task.expert(body["messages"]), "call_x")
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {"cost": cost}})

    return ScriptedProvider(cost, say)


def replay_section(
    teachers: list[dict[str, Any]], usd: float = 0.0, **settings: Any
) -> dict[str, Any]:
    """The two states of each group that the gate values most go to all teachers."""
    section = {"beta": 0.1, "ask": len(teachers), "states_per_step": 4, "teachers": teachers}
    return {**section, "states": "value", "budget": {"usd": usd}, **settings}


def play(task: ToolboxTask, index: int, sample: int, error_rate: float = 0.6) -> Trace:
    """One episode by a policy that is often wrong; its group is the episode's index."""
    name = f"train-{index:06d}-{sample:03d}"
    rng, session = random.Random(name), SyncSession(task, task.episode("train", index))
    turns, sites, read, result = list[Turn](), list[ErrorSite](), 0, None
    while result is None or not result.done:
        messages = session.messages
        wrong = rng.random() < error_rate
        text = task.corrupted(messages, rng) if wrong else task.expert(messages)
        ids = list(text.encode())
        logprobs = [-rng.random() for _ in ids]
        context = list(json.dumps(messages[read:]).encode())
        turns.append(Turn(context, ids, logprobs, [index // 2] * len(ids), "stop"))
        read, result = len(messages) + 1, session.step(text)
        sites += [result.error] if result.error is not None else []
    outcome = session.outcome()
    return Trace(
        name, index, sample, task.name, "train", index, turns, outcome.messages, outcome.reward,
        outcome.success, sites, dict(outcome.rewards), outcome.answer,
    )  # fmt: skip


def traces_of(task: ToolboxTask, groups: int, size: int = 3) -> list[Trace]:
    return [play(task, index, sample) for index in range(groups) for sample in range(size)]


def write_traces(path: Path, traces: Iterable[Trace]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(trace_to_json(trace) + b"\n" for trace in traces))
    return path


def write_run(root: Path, config: Config, traces: Iterable[Trace]) -> Path:
    """A run directory as `train` leaves it, as far as an offline replay reads it."""
    root.mkdir(parents=True, exist_ok=True)
    with closing(RunRecords(root)) as records:
        for group_id, group in groupby(traces, lambda trace: trace.group_id):
            records.add_group(group_id, list(group))
    return _with_config(root, config)


def write_older_run(root: Path, config: Config, traces: Iterable[Trace]) -> Path:
    """A run directory of before the store."""
    write_traces(root / "traces" / "traces.jsonl", traces)
    return _with_config(root, config)


def _with_config(root: Path, config: Config) -> Path:
    policy = config.policy.model_copy(update={"cache_dir": root.parent / "cache"})
    config = config.model_copy(update={"policy": policy})
    content = dump_toml(config).encode()
    (root / "config.toml").write_bytes(content)
    sign(root / "config.toml", content)
    (root / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    return root


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
