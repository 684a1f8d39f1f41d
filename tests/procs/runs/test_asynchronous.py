"""A run whose rollouts are ahead of its trainer, from the first process to the last file."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import pytest
from live_run import SHORT, launched
from shared_runs import Finished
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_mesh.configs.load import load_config
from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.directory.claim import RunDirectoryError, claimed

STEPS = SHORT["run.steps"]
ROLLOUTS = SHORT["schedule.prompts_per_step"] * SHORT["schedule.group_size"]
METRICS = {
    *("step", "policy_version", "loss/total", "loss/policy", "loss/sdpo", "loss/replay"),
    *("reward/mean", "rollouts/count", "rollouts/error_sites", "sdpo/tokens", "replay/pairs"),
    *("replay/usd", "lag/mean", "lag/max", "tokens/trained", "time/step_s"),
    *("time/wait_batch_s", "time/train_s", "time/weight_sync_s"),
}
SUMMARY = {"steps", "wall_s", "eval", "channels", "replay", "restarts"}


def test_the_shortened_quickstart_trains_in_a_live_mesh(asynchronous: Finished) -> None:
    run = asynchronous.run
    assert asynchronous.status == 0, run.stderr
    events = [event["event"] for event in run.objects("events.jsonl")]
    others = [one for one in events if not one.startswith("tracker_") and one not in WARNINGS]
    assert others[-2:] == ["checkpoint", "run_finished"]
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
    active = {name: channel["active_steps"] for name, channel in summary["channels"].items()}
    mixed = sum(step["rollouts/flat_groups"] < step["rollouts/groups"] for step in steps)
    assert active == {"policy": mixed, "sdpo": STEPS, "replay": STEPS}
    assert summary["eval"].keys() == {"initial", "final"}
    assert (run.root / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_no_file_or_folder_of_a_run_may_be_a_link_when_it_is_resumed(
    asynchronous: Finished, tmp_path: Path
) -> None:
    """The list is what this run has written, so that files of later versions are in it too."""
    (tmp_path / "own").write_text("a file of the user's own")
    places = [path.relative_to(asynchronous.run.root) for path in asynchronous.run.root.rglob("*")]
    assert {Path(".lock"), Path("events.jsonl"), Path("logs"), Path("run.sqlite")} <= {*places}
    for number, place in enumerate(places):
        copy = tmp_path / f"{number}"
        shutil.copytree(asynchronous.run.root, copy, copy_function=os.link)
        if (copy / place).is_dir():
            shutil.rmtree(copy / place)
        else:
            (copy / place).unlink()
        (copy / place).symlink_to(tmp_path / "own")
        with pytest.raises(RunDirectoryError, match="is a link to") as refused, claimed(copy):
            pass
        assert str(copy / place) in str(refused.value)
    assert (tmp_path / "own").read_text() == "a file of the user's own"


def test_a_tracker_that_never_returns_is_left_behind(asynchronous: Finished) -> None:
    told = [e["event"] for e in asynchronous.run.objects("events.jsonl") if e["actor"] == "custom"]
    assert (told[0], told[-1]) == ("tracker_started", "tracker_left_behind")


def test_the_timeline_has_what_each_actor_did_in_each_step(asynchronous: Finished) -> None:
    lines = asynchronous.run.objects("timeline.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    did = [{(actor, endpoint) for actor, endpoint, *_ in line["busy"]} for line in lines]
    assert all(("trainer", "train") in step for step in did)
    # Rollouts run ahead: the last step may have had nothing left to play or to ask.
    every = set().union(*did)
    assert {("rollouts-0", "play"), ("sdpo_teacher", "teacher_output")} <= every
    assert any(actor.startswith("teacher_replay-") for actor, _ in every)
    # The rollout workers call these two; they report it themselves.
    assert {("generator-0", "generate"), ("environment-0", "step")} <= every
    worked = [line["worked"] for line in lines]
    assert any(step.get("generator-0", 0) > 0 for step in worked)
    length_s = [line["ended"] - line["began"] for line in lines]
    for step, length in zip(worked, length_s, strict=True):
        assert all(seconds <= length + 0.002 for seconds in step.values())


def test_a_run_leaves_traces_and_pairs_that_read_back(asynchronous: Finished) -> None:
    run = asynchronous.run
    traces = {trace.trace_id: trace for trace in run.traces()}
    assert len(traces) == STEPS * ROLLOUTS
    assert any(trace.error_sites for trace in traces.values())
    pairs = run.pairs()
    assert len(pairs) == sum(step["replay/pairs"] for step in run.objects("metrics.jsonl"))
    for pair in pairs:
        assert pair.rejected_ids == traces[pair.trace_id].turns[pair.turn].action_ids
    config = load_config(run.root / "config.toml", [])
    assert config.run.steps == STEPS


def test_a_checkpoint_is_a_hugging_face_folder(asynchronous: Finished) -> None:
    folder = asynchronous.run.root / "checkpoints" / f"step-{STEPS}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 plus 3?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] > 2


def test_a_run_says_nothing_that_is_not_its_own(asynchronous: Finished) -> None:
    assert asynchronous.run.stderr == ""
    lines = asynchronous.run.stdout.split("\n")
    table = next(place for place, line in enumerate(lines) if line.strip() == "run quickstart")
    firsts = {line.partition("=")[0].split()[1] for line in lines[:table]}  # after the time
    always = {"event", "phase", "transport", "evaluation", "step"}
    assert always <= firsts <= always | {"progress", "warning"}


def test_a_channel_of_weight_zero_has_no_process_and_no_loss(policy_alone: Finished) -> None:
    run = policy_alone.run
    assert policy_alone.status == 0, run.stderr
    assert run.pids().keys() == {*("trainer", "generator-0", "environment-0", "rollouts-0")}
    (policy,) = run.events("policy_ready")
    assert policy["detail"] == str(policy_alone.seen["checkpoint"])
    steps = run.objects("metrics.jsonl")
    mixed = sum(step["rollouts/flat_groups"] < step["rollouts/groups"] for step in steps)
    for step in steps:
        assert step["loss/sdpo"] is None
        assert step["loss/replay"] is None
        assert step["loss/total"] == step["loss/policy"]
    channels = run.summary()["channels"]
    assert [channels[name]["active_steps"] for name in ("policy", "sdpo", "replay")] == [
        mixed,
        0,
        0,
    ]
    assert run.pairs() == []
    steps = run.objects("metrics.jsonl")
    assert [step["rollouts/count"] for step in steps] == [ROLLOUTS] * STEPS
    prompts = SHORT["schedule.prompts_per_step"]
    assert sum(step["rollouts/cancelled"] for step in steps) == 2 * prompts * STEPS


def test_a_policy_that_cannot_be_served_is_refused_with_the_reason_before_the_run_starts(
    asynchronous: Finished, tmp_path: Path, policies: Path
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in (asynchronous.run.root / "checkpoints" / f"step-{STEPS}").iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    settings = {"sdpo.alpha": 0, "replay.beta": 0, "policy.path": folder}
    with launched(tmp_path / "run", policies, settings) as run:
        assert run.wait() == 2
    assert f"policy.path: {folder} has no chat template: use an instruction-tuned" in run.stderr
    assert not (run.root / "events.jsonl").exists()
