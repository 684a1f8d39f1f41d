"""SDPO teachers in processes of their own: the losses of one in the trainer, and a killed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from live_run import PRESET, SHORT, LiveRun, launched
from shared_runs import with_and_without
from teacher_replaced import check_that_one_teacher_was_replaced

from composer_mesh.actors.models.policy import load_model, save_policy
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import load_config
from composer_mesh.tasks.loading import make_task

SYNCHRONOUS: dict[str, Any] = {
    "schedule.max_lag": 0,
    "eval.episodes": 1,
    "replay.beta": 0,
    "sdpo.alpha": 0.5,
    "trainer.microbatch_tokens": 400,  # a microbatch for every rollout or two
}
EMA = {"sdpo.teacher": "ema", "sdpo.ema_rate": 0.3}
MESH, INLINE = ({**EMA, "sdpo.placement": place} for place in ("mesh", "inline"))
STEPS = 8
LOSSES = ("loss/total", "loss/policy", "loss/sdpo", "policy/grad_norm")
Steps = list[dict[str, Any]]
Train = Callable[..., Steps]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, policy_cache: Path) -> Train:
    """The steps of a synchronous run by its settings; the same settings run once."""
    done: dict[str, Steps] = {}

    def steps_of(steps: int, settings: Mapping[str, Any]) -> Steps:
        values = {**SYNCHRONOUS, "run.steps": steps, **settings}
        if str(values) not in done:
            root = tmp_path_factory.mktemp("trained") / "run"
            with launched(root, policy_cache, values) as run:
                assert run.wait() == 0, run.stderr
            done[str(values)] = run.objects("metrics.jsonl")
        return done[str(values)]

    return steps_of


def assert_same_losses(one: Steps, two: Steps) -> None:
    assert len(one) == len(two)
    for mine, other in zip(one, two, strict=True):
        for name in LOSSES:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), (
                mine["step"],
                name,
            )


def test_teachers_of_the_mesh_have_the_losses_of_one_in_the_trainer(train: Train) -> None:
    """Teachers that keep an average of their own; below is one that has the newest weights."""
    mesh, inline = train(STEPS, MESH), train(STEPS, INLINE)
    assert_same_losses(mesh, inline)
    taught = [step for step in mesh if step["sdpo/views"]]
    assert len(taught) >= 4
    assert [step["step"] - 1 for step in taught] == [
        step["sdpo/teacher_version"] for step in taught
    ]
    assert all(step["loss/sdpo"] > 0 < step["sdpo/bytes"] for step in taught)
    assert [step["sdpo/bytes"] for step in inline] == [0] * STEPS


def test_two_ranks_and_two_teachers_have_the_losses_of_one_each(train: Train) -> None:
    many = train(STEPS, {**MESH, "trainer.ranks": 2, "sdpo.replicas": 2})
    assert_same_losses(many, train(STEPS, MESH))


def test_a_rank_without_an_error_site_waits_for_nothing(train: Train) -> None:
    """Here with a signal that every teacher asks its rank's student about."""
    one_site: dict[str, Any] = {
        "sdpo.max_sites_per_step": 1,
        "sdpo.teacher_output": "topk",
        "sdpo.top_k": 8,
        "sdpo.top_k_choice": "student",
    }
    many = train(3, {**one_site, "trainer.ranks": 2, "sdpo.replicas": 2})
    assert_same_losses(many, train(3, {**one_site, "sdpo.placement": "inline"}))
    assert [step["sdpo/views"] for step in many] == [1, 1, 1]


def replaced(run: LiveRun) -> None:
    """Kill the teacher while the run trains, and wait until another one is there."""
    run.until_training()
    os.kill(run.pids()["sdpo_teacher"], signal.SIGKILL)
    run.until(lambda run: run.events("actor_restarted"), "replacement of the teacher")


def other_model(policy_cache: Path, folder: Path) -> Path:
    """A model with the policy's tokenizer and a longer head, in a folder of its own."""
    values = {**SHORT, "policy.cache_dir": policy_cache}
    config = load_config(PRESET, [f"{key}={value}" for key, value in values.items()])
    policy = prepare_policy(config, make_task(config))
    model: Any = load_model(policy)
    model.resize_token_embeddings(len(model.lm_head.weight) + 7)
    save_policy(model, load_tokenizer(policy), folder)
    return folder


def test_with_wait_no_step_of_a_run_is_without_the_channel_also_of_another_model(
    tmp_path: Path, policy_cache: Path
) -> None:
    settings: dict[str, Any] = {"run.steps": 12, "eval.episodes": 1, "replay.beta": 0}
    settings["sdpo.when_lost"] = "wait"
    settings["sdpo.teacher"] = "model"
    settings["sdpo.teacher_model.path"] = other_model(policy_cache, tmp_path / "teacher")
    with launched(tmp_path / "run", policy_cache, settings) as run:
        replaced(run)
        assert run.wait() == 0, run.stderr
    assert run.stderr == ""
    assert with_and_without(run)[1] == []
    assert run.events("sdpo_lost") == []
    assert run.summary()["steps"] == 12
    check_that_one_teacher_was_replaced(run)
