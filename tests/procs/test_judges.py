"""Judges in processes of their own: a question outlives its judge actor, and keys stay there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from gated_provider import GatedProvider

from composer_mesh.actors.environment import EnvironmentActor
from composer_mesh.actors.panel_actors import JudgeActor
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.rollouts.tasks import Episode, FinishedRollout
from composer_mesh.services import service
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.run.pools import MeshJudges

TASK = """
from composer_mesh import Task, group_reward, reward


class Verse(Task):
    def generate(self, rng):
        return {"n": rng.random()}

    def prompt(self, row):
        return "Write a verse."

    @reward
    async def good(self, transcript):
        return (await self.judge("quality").score("Good?", transcript)).value

    @group_reward
    def different(self, transcripts):
        return [len({one.answer for one in transcripts}) / len(transcripts)] * len(transcripts)
"""
EPISODE = Episode("verse", "train", 0)
JUDGE = {
    "name": "quality",
    "model": "m",
    "api_key_env": "JUDGE_KEY",
    "max_tokens": 100,
    "prompt_usd_per_million": 1.0,
    "completion_usd_per_million": 1.0,
}


def config_of(folder: Path, base_url: str) -> Config:
    (folder / "verse.py").write_text(TASK)
    judges = {
        "models": [JUDGE | {"base_url": base_url}],
        "budget": {"usd": 1.0},
        "cache": str(folder / "answers.sqlite"),
    }
    data = {"task": f"{folder / 'verse.py'}:Verse"}
    run = {"name": "judged", "steps": 1}
    return Config.model_validate({"run": run, "data": data, "judges": judges})


def environ_of(pid: int) -> str:
    """The environment that a process was started with."""
    return Path(f"/proc/{pid}/environ").read_text()


async def test_a_question_is_asked_again_when_its_judge_actor_is_killed(
    host: MeshHost, tmp_path: Path
) -> None:
    restart = RestartRules(3, backoff_s=0.05)
    async with GatedProvider('{"reason": "it rhymes", "score": 0.75}') as provider:
        config = config_of(tmp_path, provider.base_url)
        environments = await service.spawn(
            EnvironmentActor, n=1, load=(config,), host=host, name="environment"
        )
        pool = await service.spawn(JudgeActor, n=1, host=host, name="judge", restart=restart)
        keys = Keys({"JUDGE_KEY": "sk-of-the-judge"})
        judges = MeshJudges(pool, environments, config, keys, lambda *_, **__: None)
        await judges.load(tmp_path)
        judges.connect()
        await environments.call("begin", "s", EPISODE)
        await environments.call("step", "s", "roses")
        scoring = asyncio.create_task(environments.call("finish", "s"))
        await provider.has(1)
        about = (await pool.fanout("describe"))[0]
        assert about["activity"].startswith("asking 1 questions, $")
        os.kill(about["pid"], signal.SIGKILL)
        await provider.has(2)
        provider.gate.set()
        outcome = await scoring
        assert (outcome.rewards, outcome.reward) == ({"good": 0.75}, 0.75)
        figures = await judges.figures()
        assert (figures["judge/requests"], figures["judge/usd"]) == (2, 0.0001)

        group = [FinishedRollout(outcome.messages, [], {})] * 2
        score = await environments.call("score_group", EPISODE, group)
        assert score.values == {"different": [0.5, 0.5]}

        (environment,) = await environments.fanout("describe")
        assert "sk-of-the-judge" not in environ_of(environment["pid"])
        await judges.close()
