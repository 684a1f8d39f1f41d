"""Evaluations are stored as they go, and a resumed one plays only what is missing.

`eval` takes a config, a run of this account, a model folder or a URL, or states a reason.
`--policy` plays a task's gold actions, or empty answers, without a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from controller_world import World, rollouts_of
from repository import ROOT

from composer_mesh.actors.checkpoints.folder import CheckpointDraft
from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.budget import BudgetRules, Prices, dollars
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services import cli
from composer_mesh.services.cli import main
from composer_mesh.services.directory.report import ABOUT_EVALUATION_FILE, wilson_interval
from composer_mesh.services.evaluation.by_mesh import play_heldout
from composer_mesh.services.evaluation.command import (
    LEDGER_FILE,
    evaluate_in_process,
    left_of,
    report,
)
from composer_mesh.services.evaluation.report import (
    about,
    figures_by_task,
    open_output,
    pass_at_k,
)
from composer_mesh.services.evaluation.target import EvalRefused, Target, target_of
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

PRICES = Prices.per_million(1.0, 2.0)
ENDPOINT = TeacherEndpoint(
    "m", "http://model.test/v1", "m", max_tokens=64, temperature=0.0, prices=PRICES
)
Play = Callable[..., int]


class Model(httpx.AsyncBaseTransport):
    """A server whose model is the task's expert, but fails where it is told to."""

    def __init__(self, task: ToolboxTask, status: Callable[[int], int] = lambda _: 200) -> None:
        self.task, self.status, self.asked = task, status, list[dict[str, Any]]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.asked.append(body)
        if (status := self.status(len(self.asked))) != 200:
            return httpx.Response(status, json={"error": {"message": "no"}})
        with SyncSession(self.task, self.task.episode("train", 0)) as session:
            session.step(self.task.expert(body["messages"]))
            message = session._running._messages[-1 if session._running._ended else -2]
        return httpx.Response(200, json={"choices": [{"message": message}]})


@pytest.fixture
def config(build_config: Any) -> Config:
    built: Config = build_config(eval={"episodes": 4})
    return built


@pytest.fixture
def play(tmp_path: Path, config: Config, toolbox: ToolboxTask) -> Play:
    """Evaluates a model on the first held-out episodes, in the same directory each time."""

    def run(model: Model, episodes: int, samples: int = 2, max_usd: float | None = None) -> int:
        left = left_of(tmp_path, range(episodes))
        signals = CommandSignals()
        with signals.caught():
            return evaluate_in_process(
                *(config, toolbox, tmp_path, left, samples, ENDPOINT, signals),
                timeout_s=5.0,
                transport=model,
                max_usd=max_usd,
            )

    return run


def test_a_served_model_is_scored_by_the_task_and_each_conversation_is_stored(
    play: Play, toolbox: ToolboxTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(toolbox)
    assert play(model, 3) == 0
    with RunReader(tmp_path) as reader:
        traces = list(reader.all_traces())
    assert [(one.index, one.sample) for one in traces] == [(i, n) for i in range(3) for n in (0, 1)]
    assert all(one.success and one.rewards == {"solved": 1.0} for one in traces)
    assert all(one.messages[-1]["role"] == "assistant" for one in traces)
    assert {one["tools"][0]["function"]["name"] for one in model.asked} == {"calculator"}
    assert len({one["seed"] for one in model.asked}) == len(model.asked)
    report(tmp_path, {"target": "m"}, range(3), 2, tmp_path / "figures.json")
    out = capsys.readouterr().out
    assert "100.0%  (43.9% to 100.0%)" in out  # of three episodes, not of six samples
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["failed_samples"] == 0
    assert figures["tasks"]["toolbox"]["pass_at"]["2"]["mean"] == 1.0


def test_a_resumed_evaluation_asks_nothing_about_stored_episodes(
    play: Play, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    assert play(Model(toolbox), 2) == 0
    again = Model(toolbox)
    assert play(again, 2) == 0
    assert again.asked == []
    assert play(again, 3) == 0
    with RunReader(tmp_path) as reader:
        assert [row.group_id for row in reader.groups()] == [0, 1, 2]
    questions = {one["messages"][0]["content"] for one in again.asked}
    assert questions == {toolbox.episode("heldout", 2).payload["question"]}


def test_failed_samples_count_nowhere_and_are_told(
    play: Play, toolbox: ToolboxTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(Model(toolbox, lambda n: 400 if n == 1 else 200), 2) == 0
    said = capsys.readouterr()
    assert "1 samples failed" in said.err
    report(tmp_path, {"target": "m"}, range(2), 2, None)
    assert "1 of 4 samples have no result and count nowhere" in capsys.readouterr().out


@pytest.mark.parametrize("status", [400, 401])
def test_an_endpoint_that_answers_nothing_is_a_failure(
    status: int, play: Play, toolbox: ToolboxTask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(Model(toolbox, lambda _: status), 2) == 1
    said = capsys.readouterr().err
    assert "the last one: http://model.test/v1, model 'm': " in said
    assert "--api-key-env" in said


def test_another_evaluation_does_not_go_on_in_a_directory(tmp_path: Path, config: Config) -> None:
    first = about(Target("m", config), "m", 2, 64)
    open_output(tmp_path, first, resume=False)
    told = json.loads((tmp_path / ABOUT_EVALUATION_FILE).read_text())
    (tmp_path / ABOUT_EVALUATION_FILE).write_text(json.dumps({**told, "begun": "2001-01-31"}))
    assert open_output(tmp_path, first, resume=True) == "2001-01-31"
    other = about(Target("m", config), "m", 4, 64)
    with pytest.raises(EvalRefused, match="its samples is 2 but that of this command is 4"):
        open_output(tmp_path, other, resume=True)
    (tmp_path / ABOUT_EVALUATION_FILE).write_text("{")
    with pytest.raises(EvalRefused, match="cannot be read"):
        open_output(tmp_path, first, resume=True)


async def test_a_policy_plays_the_held_out_episodes_that_are_left(
    tokenizer: Any, toolbox: ToolboxTask, config: Config, tmp_path: Path
) -> None:
    world = World(toolbox, ChatFormat(tokenizer, toolbox.tools), seed=1)
    sampling = Sampling.evaluation(config)
    with RunStore(tmp_path, config) as store:
        for indices in ([0, 2], left_of(tmp_path, range(4))):
            rollouts = rollouts_of(world, config)
            await play_heldout(toolbox, rollouts, store, indices, 3, sampling)
            await rollouts.close()
    with RunReader(tmp_path) as reader:
        traces = list(reader.all_traces())
    found = [(one.split, one.index, one.sample) for one in traces]
    assert found == [("heldout", index, n) for index in range(4) for n in range(3)]
    assert all(one.turns for one in traces)


def test_a_ceiling_holds_over_all_commands_of_an_evaluation(
    play: Play, toolbox: ToolboxTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def spent() -> float:
        ledger = Ledger(tmp_path / LEDGER_FILE, BudgetRules(), "m")
        try:
            return dollars(ledger.run_account().spent)
        finally:
            ledger.close()

    first, again = Model(toolbox), Model(toolbox)
    assert play(first, 4, 1, 0.005) == 1
    assert 0 < spent() <= 0.005
    assert "raise --max-usd, and continue with --resume" in capsys.readouterr().err
    assert play(again, 4, 1, 0.005) == 1
    assert again.asked == []
    assert spent() <= 0.005
    assert play(again, 4, 1, 1.0) == 0


def trace(index: int, sample: int, success: bool, task: str = "t", **rewards: float) -> Trace:
    spoken = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return Trace(
        *(f"heldout-{index:06d}-{sample:03d}", index, sample, task, "heldout", index, [], spoken),
        *(float(success), success, [], rewards),
    )


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            chosen = [any(one) for one in combinations(outcomes, k)]
            share = sum(chosen) / len(chosen)
            assert pass_at_k(samples, successes, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k} but there are 3 samples"):
        pass_at_k(3, 1, k)


def test_repeats_of_the_same_results_leave_every_interval_as_it_is() -> None:
    results = [True, False, True, True, False, True, True]
    (once,), (often,) = (
        figures_by_task([trace(i, n, one) for i, one in enumerate(results) for n in range(samples)])
        for samples in (1, 16)
    )
    assert once.success.interval == often.success.interval == wilson_interval(5 / 7, 7)
    assert once.success.mean == often.success.mean == often.pass_at[16].mean
    assert (often.episodes, often.samples) == (7, 112)


def test_an_episode_counts_once_however_many_of_its_samples_were_given_up() -> None:
    traces = [trace(0, 0, True), *(trace(1, n, False) for n in range(4))]
    (found,) = figures_by_task(traces)
    assert found.success.mean == 0.5
    assert found.pass_at[4].episodes == 1
    assert list(found.pass_at) == [1, 2, 4]


def test_tasks_are_counted_apart_with_their_own_rewards() -> None:
    traces = [trace(0, 0, True, "b", x=1.0), trace(1, 0, False, "b", x=0.5), trace(0, 0, True, "a")]
    a, b = figures_by_task(traces)
    assert (a.task, a.episodes, a.rewards) == ("a", 1, {})
    assert (b.task, b.episodes, b.rewards, b.turns) == ("b", 2, {"x": 0.75}, 1.0)


QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


@pytest.fixture
def run(tmp_path: Path, build_config: object) -> Path:
    """The directory of a run with a checkpoint of its second step."""
    config: Config = build_config()  # type: ignore[operator]
    root = tmp_path / "run"
    with RunStore(root, config):
        pass
    for step in (1, 2):
        draft = CheckpointDraft(root, step)
        (draft.folder / "config.json").write_text("{}")
        draft.commit([])
    return root


def test_a_config_is_evaluated_without_teachers_and_hints() -> None:
    target = target_of(QUICKSTART, None, ["eval.episodes=7"])
    assert not target.config.sdpo.on
    assert not target.config.replay.on
    assert (target.config.eval.episodes, target.config.policy.path) == (7, None)


def test_a_run_is_evaluated_at_its_newest_checkpoint(run: Path) -> None:
    target = target_of(str(run), None, [])
    assert target.config.policy.path == run / "checkpoints" / "step-2"
    assert target.config.run.name == "unit"


def test_a_checkpoint_has_the_task_of_its_run_or_of_the_command(run: Path, tmp_path: Path) -> None:
    first = run / "checkpoints" / "step-1"
    assert target_of(str(first), None, []).config.run.name == "unit"
    elsewhere = tmp_path / "elsewhere"
    first.rename(elsewhere)
    with pytest.raises(EvalRefused, match="outside of a run, which has no task: add --task"):
        target_of(str(elsewhere), None, [])
    target = target_of(str(elsewhere), "toolbox", [])
    assert (target.config.policy.path, target.config.data.task) == (elsewhere, "toolbox")


def test_code_that_a_strangers_run_names_is_not_imported(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text() + "\n")  # its signature does not fit any more
    for named in (run, run / "checkpoints" / "step-1"):
        with pytest.raises(EvalRefused, match="was not written by a run of this account"):
            target_of(str(named), None, [])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["http://h/v1", "--model", "m"], "is a URL, which has no task: add --task"),
        (["http://h/v1", "--task", "toolbox"], "add --model NAME"),
        (["nowhere"], "nowhere cannot be evaluated"),
        ([QUICKSTART, "--samples", "0"], "--samples is 0"),
        ([QUICKSTART, "--samples", "2"], "add --set eval.temperature=1.0"),
        ([QUICKSTART, "--model", "m"], "--model is for URLs"),
        ([QUICKSTART, "--task", "toolbox"], "is a config, which has its own"),
        ([QUICKSTART, "--resume"], "leave --resume out to begin"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert why in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir() if one.name != "runs"] == []


TASK = """
import random
from composer_mesh import Row, Task, Transcript, reward


class Sums(Task):
    def generate(self, rng: random.Random) -> Row:
        return {"a": rng.randint(1, 999)}

    def prompt(self, row: Row) -> str:
        return f"What is {row['a']} plus 1?"

    @reward
    def correct(self, transcript: Transcript) -> float:
        return float(transcript.answer == str(transcript.row["a"] + 1))


class Solved(Sums):
    def gold(self, row: Row) -> list[str]:
        return [str(row["a"] + 1)]
"""


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(TASK)
    path = tmp_path / "sums.toml"
    path.write_text('[run]\nname = "s"\nsteps = 1\n[data]\ntask = "sums.py:Solved"\n')
    return path


@pytest.mark.parametrize(("policy", "share"), [("gold", 1.0), ("empty", 0.0)])
def test_a_scripted_policy_is_scored_without_a_model(
    sums: Path, tmp_path: Path, policy: str, share: float
) -> None:
    figures = tmp_path / "figures.json"
    line = ["eval", str(sums), "--policy", policy, "--report", str(figures)]
    assert cli.main([*line, "--set", "eval.episodes=3"]) == 0
    found = json.loads(figures.read_text())
    assert found["tasks"]["solved"]["success"]["mean"] == share
    assert found["tasks"]["solved"]["episodes"] == 3
    assert (
        json.loads((tmp_path / "runs/s-eval" / ABOUT_EVALUATION_FILE).read_text())["model"]
        == policy
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--set", "data.task=sums.py:Sums"], "states no gold actions: define gold"),
        (["--samples", "2", "--set", "eval.temperature=1.0"], "always acts the same"),
    ],
)
def test_a_scripted_policy_that_cannot_be_played_is_refused_before_anything_is_stored(
    sums: Path,
    tmp_path: Path,
    options: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["eval", str(sums), "--policy", "gold", *options]) == 2
    assert reason in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "runs").exists()
