"""Channel 3 in whole runs: paid teachers, a lost replica, the same pairs offline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy, Model
from live_run import ENDLESS, LiveRun, composer_mesh, launched

from composer_mesh.actors.experts.http import TOKEN_ENV
from composer_mesh.rollouts.money import NANO
from composer_mesh.rollouts.pairs import PreferencePair

pytestmark = pytest.mark.timeout(600)

KEY, KEY_ENV = "sk-or-v1-0123456789abcdef-the-key", "FAULT_PROXY_KEY"
CEILING_USD = 0.02
LATE = {"replay.delivery": "late"}
ONLY_WHAT_IS_NEW = {
    **{f"replay.gate.{sign}": 0 for sign in ("error", "entropy", "disagreement")},
    "replay.gate.min_value": 0.3,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> Iterator[LiveRun]:
    settings = {"run.steps": 4, **ONLY_WHAT_IS_NEW, **LATE}
    with launched(tmp_path_factory.mktemp("replay") / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
        yield run


def pairs_of(run: LiveRun) -> dict[str, PreferencePair]:
    pairs = run.pairs()
    assert len({pair.pair_id for pair in pairs}) == len(pairs)
    return {pair.pair_id: pair for pair in pairs}


def test_an_offline_replay_of_a_run_gives_the_same_pairs(finished: LiveRun, tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    done = composer_mesh("replay", str(finished.root), "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = pairs_of(finished)
    assert pairs
    assert {row["state_id"]: (row["chosen_text"], row["rejected_text"]) for row in rows} == {
        pair.state_id: (pair.chosen_text, pair.rejected_text) for pair in pairs.values()
    }


def test_each_pair_is_scored_once_and_the_filters_and_the_gate_are_counted(
    finished: LiveRun,
) -> None:
    steps, summary = finished.objects("metrics.jsonl"), finished.summary()["replay"]
    pairs = pairs_of(finished)
    assert all(pair.reference is not None for pair in pairs.values())
    assert sum(step["replay/pairs"] for step in steps) == summary["pairs"] <= len(pairs)
    assert summary["outcomes"]["pair"] == len(pairs) + sum(summary["dropped"].values())
    assert sum(summary["outcomes"].values()) == summary["states"]
    assert summary["skipped"] > 0
    assert all(step["replay/age"] <= 8 for step in steps)


def teachers(base_url: str) -> str:
    one = (
        '{{name="{0}", kind="openai", model="{0}", base_url="{1}", api_key_env="{2}", '
        "prompt_usd_per_million=1.0, completion_usd_per_million=10.0, max_tokens=64}}"
    )
    return f"[{', '.join(one.format(name, base_url, KEY_ENV) for name in 'abc')}]"


async def test_paid_teachers_never_cost_more_than_the_ceiling_and_the_key_is_nowhere(
    tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every fault that a provider knows; the proxy keeps a ledger of its own."""
    monkeypatch.setenv(KEY_ENV, KEY)
    models = {name: Model(1_000, 10_000) for name in "abc"}
    async with FaultProxy(KEY, models, seed=5) as proxy:
        settings = {
            "replay.teachers": teachers(proxy.base_url),
            **LATE,
            "replay.budget.usd": CEILING_USD,
            "replay.timeout_s": 2.0,
            "replay.breaker.rest_s": 0.2,
        }
        with launched(tmp_path / "run", policy_cache, settings) as run:
            await asyncio.to_thread(run.until_training)
            assert processes_with_a_secret(run) == []
            assert await asyncio.to_thread(run.wait) == 0, run.stderr
        spent = run.summary()["replay"]["usd"]
        assert 0 < proxy.charged <= round(spent * NANO) + 1
        assert spent <= CEILING_USD
    assert run.summary()["replay"]["failed"]
    assert files_with_the_key(tmp_path) == []
    assert (tmp_path / "run" / "logs" / "monarch-teacher_replay-0.log").exists()


def processes_with_a_secret(run: LiveRun) -> list[int]:
    """Of the processes that a run has started: their environments, and their commands."""
    started = [pid for pid in run.living() if pid != run.process.pid]
    assert len(started) > 3
    return [pid for pid in started if any(word in told(pid) for word in (KEY_ENV, KEY, TOKEN_ENV))]


def told(pid: int) -> str:
    try:
        texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    except FileNotFoundError:  # it has ended
        return ""
    return b"".join(texts).decode(errors="replace")


def files_with_the_key(folder: Path) -> list[Path]:
    """Of all that a run has written: its directory with Monarch's logs, its output and errors."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_lost_replica_costs_no_state_and_the_run_goes_on(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {**ENDLESS, **LATE, "replay.actors": 2, "run.steps": 6}
    with launched(tmp_path / "run", policy_cache, settings) as run:
        run.until_training()
        os.kill(run.pids()["teacher_replay-0"], signal.SIGKILL)
        assert run.wait() == 0, run.stderr
    assert [event["actor"] for event in run.events("actor_died")] == ["teacher_replay-0"]
    replay = run.summary()["replay"]
    assert replay["failed"] == {}
    assert sum(replay["outcomes"].values()) == replay["states"] > 0
