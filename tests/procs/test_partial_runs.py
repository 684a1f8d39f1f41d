"""Half a run, in real processes: generators alone, then a trainer alone on what they stored."""

from __future__ import annotations

import json
from pathlib import Path

from live_run import PRESET, SHORT, composer_mesh, launched

from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import GroupState

STEPS = 2


def test_what_generators_alone_have_stored_a_trainer_alone_can_train(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings = {"run.steps": STEPS}
    with launched(tmp_path / "rolled", policy_cache, settings, options=["--rollout-only"]) as run:
        assert run.wait() == 0, run.stderr
    assert (
        {"generator-0", "environment-0", "rollouts-0"}
        <= run.pids().keys()
        <= {"generator-0", "environment-0", "rollouts-0", "trainer"}
    )
    assert [event["fields"]["tokens"] > 0 for event in run.events("rollouts_sampled")] == [True] * 2
    assert "tokens/s" in run.stdout.splitlines()[-1]
    with RunReader(run.root) as reader:
        assert [row.state for row in reader.groups()] == [GroupState.FINISHED] * 4
        assert list(reader.steps()) == []

    source = ["--from-traces", str(run.root)]
    with launched(tmp_path / "replayed", policy_cache, settings, options=source) as run:
        assert run.wait() == 0, run.stderr
    assert run.pids().keys() <= {"trainer", "sdpo_teacher"}
    assert "Warning" not in run.stderr
    assert [step["step"] for step in run.objects("metrics.jsonl")] == [1, 2]
    assert all(step["sdpo/tokens"] > 0 for step in run.objects("metrics.jsonl"))
    assert (run.root / "checkpoints" / f"step-{STEPS}").is_dir()


def test_a_policy_is_evaluated_without_a_trainer_and_stored_episodes_are_not_played_again(
    tmp_path: Path, policy_cache: Path
) -> None:
    values = {**SHORT, "policy.cache_dir": policy_cache, "eval.temperature": 1.0}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    place = ["--output", str(tmp_path / "eval"), "--report", str(tmp_path / "eval.json")]
    command = ["eval", str(PRESET), *settings, "--samples", "2", *place]
    first, again = composer_mesh(*command), composer_mesh(*command, "--resume")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "pass@2" in again.stdout
    assert "starting actors" in first.stdout
    assert "starting actors" not in again.stdout
    figures = json.loads((tmp_path / "eval.json").read_text())["tasks"]["toolbox"]
    assert (figures["episodes"], figures["samples"]) == (8, 16)
    with RunReader(tmp_path / "eval") as reader:
        assert {trace.split for trace in reader.all_traces()} == {"heldout"}
