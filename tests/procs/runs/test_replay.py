"""Channel 3 in whole runs: late pairs, and paid teachers."""

from __future__ import annotations

import json
from pathlib import Path

from live_run import LiveRun, composer_mesh
from shared_runs import CEILING_USD, KEY, Finished

from composer_mesh.rollouts.budget import NANO
from composer_mesh.rollouts.pairs import PreferencePair


def pairs_of(run: LiveRun) -> dict[str, PreferencePair]:
    pairs = run.pairs()
    assert len({pair.pair_id for pair in pairs}) == len(pairs)
    return {pair.pair_id: pair for pair in pairs}


def test_an_offline_replay_of_a_run_gives_the_same_pairs(
    late_replay: Finished, tmp_path: Path
) -> None:
    out = tmp_path / "pairs.jsonl"
    done = composer_mesh("replay", str(late_replay.run.root), "--output", str(out))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    pairs = pairs_of(late_replay.run)
    assert pairs
    assert {row["state_id"]: (row["chosen_text"], row["rejected_text"]) for row in rows} == {
        pair.state_id: (pair.chosen_text, pair.rejected_text) for pair in pairs.values()
    }


def test_each_pair_is_scored_once_and_the_filters_and_the_gate_are_counted(
    late_replay: Finished,
) -> None:
    assert late_replay.status == 0, late_replay.run.stderr
    steps = late_replay.run.objects("metrics.jsonl")
    summary = late_replay.run.summary()["replay"]
    pairs = pairs_of(late_replay.run)
    assert all(pair.reference is not None for pair in pairs.values())
    assert sum(step["replay/pairs"] for step in steps) == summary["pairs"] <= len(pairs)
    assert summary["outcomes"]["pair"] == len(pairs) + sum(summary["dropped"].values())
    assert sum(summary["outcomes"].values()) >= summary["states"] > 0  # of siblings, too
    assert summary["skipped"] > 0
    assert all(step["replay/age"] <= 8 for step in steps)


def test_paid_teachers_never_cost_more_than_the_ceiling(paid_replay: Finished) -> None:
    """Through every fault that a provider knows; the proxy keeps a ledger of its own."""
    run = paid_replay.run
    assert paid_replay.status == 0, run.stderr
    spent = run.summary()["replay"]["usd"]
    assert 0 < paid_replay.seen["charged"] <= round(spent * NANO) + 1
    assert spent <= CEILING_USD
    assert run.summary()["replay"]["failed"]


def test_the_key_of_a_provider_is_in_no_file_and_no_process_of_a_run(
    paid_replay: Finished,
) -> None:
    """Of the processes: their environments and commands; of the files: Monarch's logs too."""
    assert len(paid_replay.seen["started"]) > 3
    assert paid_replay.seen["knowing"] == []
    run = paid_replay.run
    assert files_with_the_key(run.root.parent) == []
    assert (run.root / "logs" / "monarch-teacher_replay-0.log").exists()


def files_with_the_key(folder: Path) -> list[Path]:
    """Of all that a run has written: its directory with Monarch's logs, its output and errors."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    return [path for path in files if KEY.encode() in path.read_bytes()]
