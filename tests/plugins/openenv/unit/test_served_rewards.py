"""Late rewards of an OpenEnv server: posted to the rollouts of its episodes, each once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from inspected_runs import group_of, write_run
from openenv_server import OpenEnvServer, page
from served_tasks import served_beside

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.openenv.client.errors import ConnectionLost, ServerFailure
from composer_mesh.plugins.openenv.client.options import read_options
from composer_mesh.plugins.openenv.client.server import Server
from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.plugins.openenv.client.wire import ServedReward, ServedRewards
from composer_mesh.plugins.openenv.served_rewards import follow_server
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.cli import main
from composer_mesh.services.replay.post_reward import post_reward
from composer_mesh.services.store.reading import RunReader
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task, TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

SOURCE = "server of the test"


class Told:
    """A server's rewards as a test adds them, two at a time; it may be away."""

    def __init__(self) -> None:
        self.rewards: list[ServedReward] = []
        self.away, self.store = False, "first"

    def add(self, episode_id: str, reward: float) -> None:
        number = len(self.rewards) + 1
        self.rewards.append(ServedReward(number=number, episode_id=episode_id, reward=reward))

    def rewards_after(self, number: int) -> ServedRewards:
        if self.away:
            raise ConnectionLost("http://127.0.0.1:1", "it is away")
        later = [one for one in self.rewards if one.number > number][:2]
        return ServedRewards(store=self.store, rewards=later)


@pytest.fixture
def groups() -> list[list[Trace]]:
    task = ToolboxTask.create(TaskSettings(seed=3))
    return [
        [replace(trace, episode_id=f"episode of {trace.trace_id}") for trace in group_of(task, one)]
        for one in range(2)
    ]


@pytest.fixture
async def run(tmp_path: Path, build_config: Any, groups: list[list[Trace]]) -> Path:
    config: Config = build_config(late_rewards={"max_age": 2})
    await write_run(tmp_path / "run", config, groups)
    return tmp_path / "run"


def posted(run: Path) -> list[tuple[str, float, str]]:
    with RunReader(run) as reader:
        return [(one.trace_id, one.reward, one.source) for one in reader.rewards(state=None)]


def follow(run: Path, told: Told, *changes: Any) -> tuple[int, list[str]]:
    """Follow a server, with a change after each look; return the status and what was said."""
    left, said = list(changes), list[str]()

    def wait() -> None:
        left.pop(0)()

    status = follow_server(
        run, told, SOURCE, more=lambda: bool(left), wait=wait, report=said.append
    )
    return status, said


async def test_rewards_reach_the_rollouts_of_their_episodes_and_no_others(
    run: Path, groups: list[list[Trace]]
) -> None:
    told, (first, second) = Told(), groups[0][:2]
    for number in range(5):
        told.add(f"episode of another run {number}", 1.0)
    told.add(first.episode_id, 0.25)

    def later() -> None:
        told.add(second.episode_id, 0.5)
        told.add(first.episode_id, 0.75)

    assert follow(run, told, later) == (0, [])
    assert posted(run) == [
        (first.trace_id, 0.25, SOURCE),
        (second.trace_id, 0.5, SOURCE),
        (first.trace_id, 0.75, SOURCE),
    ]


async def test_following_a_server_again_posts_nothing_twice(
    run: Path, groups: list[list[Trace]]
) -> None:
    told, trace = Told(), groups[0][0]
    told.add(trace.episode_id, 0.25)
    follow(run, told)
    post_reward(run, trace.trace_id, 0.9, "a reviewer")
    follow(run, told)
    assert [reward for _, reward, _ in posted(run)] == [0.25, 0.9]
    told.add(trace.episode_id, 0.5)
    follow(run, told)
    assert [reward for _, reward, _ in posted(run)] == [0.25, 0.9, 0.5]


async def test_a_server_that_was_started_again_is_asked_from_its_first_reward_on(
    run: Path, groups: list[list[Trace]]
) -> None:
    told, (first, second) = Told(), groups[0][:2]
    told.add("another run", 1.0)
    told.add(first.episode_id, 0.25)

    def restarted() -> None:
        told.store, told.rewards = "second", []
        told.add(second.episode_id, 0.5)

    follow(run, told, restarted)
    assert [one[:2] for one in posted(run)] == [(first.trace_id, 0.25), (second.trace_id, 0.5)]


async def test_an_outage_is_told_once_and_loses_no_reward(
    run: Path, groups: list[list[Trace]]
) -> None:
    told, trace = Told(), groups[1][0]
    told.add(trace.episode_id, 0.25)
    told.away = True

    def back() -> None:
        told.away = False

    status, said = follow(run, told, lambda: None, back)
    assert status == 0
    assert len(said) == 1
    assert "it is away" in said[0]
    assert [one[:2] for one in posted(run)] == [(trace.trace_id, 0.25)]
    told.away = True
    status, said = follow(run, told)
    assert status == 1
    assert said[-1].startswith("the last rewards may be missing")


async def test_a_reward_of_our_own_server_names_the_episode_that_was_played(
    tmp_path: Path, build_config: Any, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = build_config(data={"task": "served_tasks:Count"})
    (tmp_path / "served").mkdir()
    with served_beside(tmp_path / "served", config) as url:
        task: Task = OpenEnvTask.create(TaskSettings(), url=url)
        running = RunningEpisode(task, task.episode("train", 1))
        await running.begin()
        await running.step("done")
        played = (await running.outcome()).episode_id
        await running.close()
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for episode, reward in (("other", 1.0), (played, 0.5)):
                body = {"episode_id": episode, "reward": reward}
                assert (await http.post("/rewards", json=body)).status_code == 200
            for bad in ("-1", "x", "1" * 30, ""):
                assert (await http.get("/rewards", params={"after": bad})).status_code == 400
        options = read_options({"url": url})
        server = Server(options, {}, 10.0)
        told = server.rewards_after(0).rewards
        assert [(one.episode_id, one.reward) for one in told] == [("other", 1.0), (played, 0.5)]
        assert server.rewards_after(told[0].number).rewards == told[1:]
        assert server.rewards_after(told[1].number).rewards == []
        command = ["reward", str(run), "--openenv", url]
        assert main(command) == 0
        assert posted(run) == []
        assert main([*command, "--file", "posts.jsonl"]) == 2
        assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "told",
    [
        {"rewards": [{"number": 2, "episode_id": "a", "reward": 1}] * 2},
        {"rewards": [{"number": 0, "episode_id": "a", "reward": 1}]},
        {"rewards": [{"number": 1, "episode_id": "a", "reward": 1e300}]},
        {"rewards": [{"number": 1, "episode_id": "a" * 100_000, "reward": 1}]},
        {"rewards": [{"number": 1, "episode_id": "a", "reward": None}]},
        {"rewards": "all"},
        [],
    ],
    ids=["again", "number", "large", "long", "none", "text", "list"],
)
def test_a_server_that_tells_rewards_of_another_form_gives_none(told: Any) -> None:
    with OpenEnvServer(pages={"/rewards?after=0": page("200 OK", told)}) as hostile:
        server = Server(read_options({"url": hostile.url}), {}, 10.0)
        with pytest.raises(ServerFailure):
            server.rewards_after(0)
        with pytest.raises(ServerFailure, match="has no /rewards"):
            server.rewards_after(7)
