"""Whole runs of the real quickstart preset, shortened, from the first process to the last file."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_run import SHORT, LiveRun, launched, untimed
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_mesh.configs.load import load_config
from composer_mesh.services.directory.claim import RunDirectoryError, claimed

pytestmark = pytest.mark.timeout(600)

STEPS = SHORT["run.steps"]
ROLLOUTS = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]
METRICS = {
    *("step", "policy_version", "loss/total", "loss/policy", "loss/sdpo", "loss/replay"),
    *("reward/mean", "rollouts/count", "rollouts/error_sites", "sdpo/tokens", "replay/pairs"),
    *("replay/usd", "lag/mean", "lag/max", "tokens/trained", "time/step_s"),
    *("time/wait_batch_s", "time/train_s", "time/weight_sync_s"),
}
BLOCKED = {
    "tracking": '[{type = "custom", import_path = "blocking_tracker:BlockingTracker", '
    "queue = 1, finish_s = 0.2}]"
}
SUMMARY = {"steps", "wall_s", "eval", "channels", "replay", "restarts"}


@dataclass(frozen=True)
class Finished:
    """A run that went to its end."""

    run: LiveRun
    status: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> Iterator[Finished]:
    root = tmp_path_factory.mktemp("finished") / "run"
    with launched(root, policy_cache, BLOCKED, as_installed=True) as run:
        yield Finished(run, run.wait())


def test_the_shortened_quickstart_trains_in_a_live_mesh(finished: Finished) -> None:
    run = finished.run
    assert finished.status == 0, run.stderr
    events = [event["event"] for event in run.objects("events.jsonl")]
    assert [one for one in events if not one.startswith("tracker_")][-2:] == [
        "checkpoint",
        "run_finished",
    ]
    steps = run.objects("metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.keys() >= METRICS
        assert all(math.isfinite(step[key]) for key in METRICS)  # no channel is null either
        assert step["sdpo/tokens"] > 0
        assert step["replay/pairs"] > 0
        assert step["lag/max"] <= 1
    summary = run.summary()
    assert summary.keys() >= SUMMARY
    assert summary["steps"] == STEPS
    assert {channel["active_steps"] for channel in summary["channels"].values()} == {STEPS}
    assert summary["eval"].keys() == {"initial", "final"}
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_no_file_or_folder_of_a_run_may_be_a_link_when_it_is_resumed(
    finished: Finished, tmp_path: Path
) -> None:
    """The list is what this run has written, so that files of later versions are in it too."""
    (tmp_path / "own").write_text("a file of the user's own")
    places = [path.relative_to(finished.run.root) for path in finished.run.root.rglob("*")]
    assert {Path(".lock"), Path("events.jsonl"), Path("logs"), Path("run.sqlite")} <= {*places}
    for number, place in enumerate(places):
        copy = tmp_path / f"{number}"
        shutil.copytree(finished.run.root, copy, copy_function=os.link)
        if (copy / place).is_dir():
            shutil.rmtree(copy / place)
        else:
            (copy / place).unlink()
        (copy / place).symlink_to(tmp_path / "own")
        with pytest.raises(RunDirectoryError, match="is a link to") as refused, claimed(copy):
            pass
        assert str(copy / place) in str(refused.value)
    assert (tmp_path / "own").read_text() == "a file of the user's own"


def test_a_tracker_that_never_returns_is_left_behind(finished: Finished) -> None:
    told = [e["event"] for e in finished.run.objects("events.jsonl") if e["actor"] == "custom"]
    assert (told[0], told[-1]) == ("tracker_started", "tracker_left_behind")


def test_the_timeline_has_what_each_actor_did_in_each_step(finished: Finished) -> None:
    lines = finished.run.objects("timeline.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    did = [{(actor, endpoint) for actor, endpoint, *_ in line["busy"]} for line in lines]
    assert all(("trainer", "train") in step for step in did)
    # Rollouts run ahead: the last step may have had nothing left to play or to ask.
    every = set().union(*did)
    assert {("rollouts-0", "play"), ("sdpo_teacher", "teacher_output")} <= every
    assert any(actor.startswith("teacher_replay-") for actor, _ in every)


def test_a_run_leaves_traces_and_pairs_that_read_back(finished: Finished) -> None:
    run = finished.run
    traces = {trace.trace_id: trace for trace in run.traces()}
    assert len(traces) == STEPS * ROLLOUTS
    assert any(trace.error_sites for trace in traces.values())
    pairs = run.pairs()
    assert len(pairs) == sum(step["replay/pairs"] for step in run.objects("metrics.jsonl"))
    for pair in pairs:
        assert pair.rejected_ids == traces[pair.trace_id].turns[pair.turn].action_ids
    config = load_config(run.root / "config.toml", [])
    assert config.run.steps == STEPS


def test_a_checkpoint_is_a_hugging_face_folder(finished: Finished) -> None:
    folder = finished.run.root / "checkpoints" / f"step-{STEPS}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 plus 3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > 2


def test_a_run_says_nothing_that_is_not_its_own(finished: Finished) -> None:
    assert finished.run.stderr == ""
    lines = finished.run.stdout.split("\n")
    table = next(place for place, line in enumerate(lines) if line.strip() == "run quickstart")
    firsts = {line.partition("=")[0].split()[0] for line in lines[:table]}
    assert firsts == {"event", "phase", "transport", "evaluation", "step"}


def test_a_channel_of_weight_zero_has_no_process_and_no_loss(
    finished: Finished, tmp_path: Path, policy_cache: Path
) -> None:
    """From a folder in Hugging Face format, which is the checkpoint of another run; its groups are
    over-provisioned."""
    folder = finished.run.root / "checkpoints" / f"step-{STEPS}"
    settings = {"sdpo.alpha": 0, "replay.beta": 0, "policy.path": folder}
    settings["schedule.overprovision"] = 2
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 0, run.stderr
    assert run.pids().keys() == {*("trainer", "generator-0", "environment-0", "rollouts-0")}
    (policy,) = run.events("policy_ready")
    assert policy["detail"] == str(folder)
    for step in run.objects("metrics.jsonl"):
        assert step["loss/sdpo"] is None
        assert step["loss/replay"] is None
        assert step["loss/total"] == step["loss/policy"]
    channels = run.summary()["channels"]
    assert [channels[name]["active_steps"] for name in ("policy", "sdpo", "replay")] == [3, 0, 0]
    assert run.pairs() == []
    steps = run.objects("metrics.jsonl")
    assert [step["rollouts/count"] for step in steps] == [ROLLOUTS] * STEPS
    prompts = SHORT["schedule.prompts_per_step"]
    assert sum(step["rollouts/cancelled"] for step in steps) == 2 * prompts * STEPS


def test_a_policy_that_cannot_be_served_is_refused_with_the_reason_before_the_run_starts(
    finished: Finished, tmp_path: Path, policy_cache: Path
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in (finished.run.root / "checkpoints" / f"step-{STEPS}").iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    settings = {"sdpo.alpha": 0, "replay.beta": 0, "policy.path": folder}
    with launched(tmp_path / "run", policy_cache, settings) as run:
        assert run.wait() == 2
    assert f"policy.path: {folder} has no chat template: use an instruction-tuned" in run.stderr
    assert not (run.root / "events.jsonl").exists()


def test_synchronous_runs_of_several_replicas_repeat(tmp_path: Path) -> None:
    """With the groups that they drop; the first makes the warm start, the second finds it.

    The second has another number of rollout workers, and an interpreter that hashes otherwise.
    """
    settings = {
        "run.steps": 2,
        "schedule.max_lag": 0,
        "schedule.dynamic_sampling": "true",
        "generator.replicas": 2,
        "environment.replicas": 2,
        "rollouts.workers": 1,
    }
    twice, traces = [], []
    for name in ("first", "second"):
        cache, other = tmp_path / "policies", name == "second"
        settings["rollouts.workers"] = 3 if other else 1
        with launched(tmp_path / name, cache, settings, as_installed=other) as run:
            assert run.wait() == 0, run.stderr
        assert {"generator-0", "generator-1"} <= run.pids().keys()
        twice.append([untimed(step) for step in run.objects("metrics.jsonl")])
        traces.append(run.traces())
    assert json.dumps(twice[0]) == json.dumps(twice[1])
    assert traces[0] == traces[1]
    assert [step["lag/max"] for step in twice[0]] == [0, 0]
    assert sum(step["rollouts/dropped_groups"] for step in twice[0]) > 0
