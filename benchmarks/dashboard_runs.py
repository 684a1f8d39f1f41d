"""Run directories for benchmarks/dashboard.py: many small ones, and one with very many rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.directory.report import EVALUATIONS_FILE, METRICS_FILE, Evaluation
from composer_mesh.services.store.records import RunRecords
from composer_mesh.services.store.writing import RunStore

PRESET = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
GROUP = 8
KINDS = ("unknown_tool", "bad_arguments", "missing_key", "wrong_answer")


def step_metrics(step: int, rng: random.Random) -> dict[str, Any]:
    """Metrics of one step, with as many keys as a run writes."""
    reward = 1 / (1 + math.exp(-(step - 30) / 15)) + rng.gauss(0, 0.04)
    figures: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "loss/total": 0.3 / (1 + step / 40) + rng.gauss(0, 0.01),
        "loss/policy": 0.2 / (1 + step / 40) + rng.gauss(0, 0.01),
        "loss/sdpo": 0.06 + rng.gauss(0, 0.005),
        "loss/replay": 0.69 + rng.gauss(0, 0.01),
        "reward/mean": min(1.0, max(0.0, reward)),
        "reward/success": min(1.0, max(0.0, reward)),
        "lag/mean": rng.random(),
        "lag/max": 1,
        "tokens/trained": 2500 + rng.randrange(500),
        "replay/usd_total": step * 0.002,
        "replay/answers": 9,
        "replay/outcome/pair": 2,
        "time/step_s": 1 + rng.random() / 5,
        "time/wait_batch_s": rng.random() / 10,
        "time/train_s": 0.9,
        "time/weight_sync_s": 0.02,
    }
    return figures | {f"filler/{number}": rng.random() for number in range(60)}


def small_run(runs: Path, number: int, steps: int = 70) -> None:
    """Write the files of a finished run, without rollouts."""
    root, rng = runs / f"run-{number:03d}", random.Random(number)
    root.mkdir(parents=True)
    lr = f"{rng.choice((1, 2, 3))}e-4"
    overrides = [f"run.name=run-{number:03d}", f"run.seed={number % 3}", f"trainer.lr={lr}"]
    (root / "config.toml").write_text(dump_toml(load_config(PRESET, overrides)))
    lines = [json.dumps(step_metrics(step, rng)) for step in range(1, steps + 1)]
    (root / METRICS_FILE).write_text("\n".join(lines) + "\n")
    evaluations = [Evaluation(step, step / steps, 200) for step in (0, steps)]
    evaluated = "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in evaluations)
    (root / EVALUATIONS_FILE).write_text(evaluated)
    (root / "events.jsonl").write_text('{"time": 1, "event": "run_finished", "actor": ""}\n')


def large_run(root: Path, rollouts: int) -> Config:
    """Write a run with so many rollouts in groups of GROUP, one step for six groups."""
    config = load_config(PRESET, ["run.name=large"])
    root.mkdir(parents=True)
    asyncio.run(_steps(root, config, rollouts // GROUP))
    return config


async def _steps(root: Path, config: Config, groups: int) -> None:
    rng = random.Random(0)
    with RunStore(root, config) as store:
        store.add_event("run_started")
    records = RunRecords(root)
    with records.file.transaction():
        for group in range(groups):
            records.enter(group, group // 6)
            records.add_group(group, [_rollout(group, sample, rng) for sample in range(GROUP)])
        for step in range(groups // 6):
            records.plan_step(step, range(step * 6, step * 6 + 6), b"{}", [], None, {})
            records.end_step(step, json.dumps(step_metrics(step + 1, rng)).encode())
    records.close()
    with RunStore(root, config) as store:  # writes the copies of the rows
        store.add_event("run_finished")


def _rollout(group: int, sample: int, rng: random.Random) -> Trace:
    version = group // 6
    turns, messages = [], list[Message]()
    messages.append({"role": "user", "content": f"What is {group} times {sample}?"})
    sites = []
    for number in range(1 + rng.randrange(4)):
        sampled = [rng.randrange(500) for _ in range(6)]
        logprobs = [-rng.random() for _ in sampled]
        turns.append(Turn([1, 2, 3], sampled, logprobs, [version] * 6, "stop"))
        messages.append({"role": "assistant", "content": f"lookup {number}"})
        messages.append({"role": "tool", "content": "no such key"})
        if rng.random() < 0.4:
            kind = rng.choice(KINDS)
            sites.append(ErrorSite(number, kind, kind, {"tool": "lookup"}))
    reward = float(rng.random() < 0.5)
    name = f"train-{group:06d}-{sample:03d}"
    done = (turns, messages, reward, bool(reward), sites)
    return Trace(name, group, sample, "toolbox", "train", group, *done)
