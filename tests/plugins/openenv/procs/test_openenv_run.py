"""A run on an OpenEnv server that is killed on the way and comes back."""

import threading
from pathlib import Path

from kept_port import kept_port
from live_run import launched
from openenv_server import TEXT, Json, OpenEnvServer, Socket

TASK = """
from composer_mesh.plugins.openenv.client.task import OpenEnvTask


class Served(OpenEnvTask):
    def expert(self, messages):
        return "one"

    def corrupted(self, messages, rng):
        return "two"
"""
PLAYED = 10
"""Episodes after which the server says nothing more, until it is killed."""


def test_a_server_that_is_killed_costs_no_episode_and_no_reward(
    tmp_path: Path, policy_cache: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "served.py").write_text(TASK)
    silent = threading.Event()

    async def step(socket: Socket, data: Json) -> None:
        if len(server.resets) <= PLAYED:
            server.regular(socket, "step", data)
        else:
            silent.set()

    server = OpenEnvServer(action=TEXT, hooks={"step": step})
    options = '{url="URL", action="text", reward="summed", success_at=0.75}'
    with server:
        settings = {
            "data.task": "served.py:Served",
            "data.options": options.replace("URL", server.url),
            "run.steps": 3,
            "policy.warm_start.steps": 2,
            "policy.warm_start.demonstrations": 1,
            "policy.warm_start.hinted_share": 0.0,
            "supervision.rollout_retries": 1000,
            "environment.call_s": 200.0,
            "environment.tool_error_penalty": 0.0,
            "schedule.group_size": 2,
            "sdpo.alpha": 0,
            "replay.beta": 0,
            "eval.episodes": 2,
        }
        with launched(tmp_path / "run", policy_cache, settings, tmp_path / "work") as run:
            run.until(lambda _: silent.is_set(), "session in a step without an answer")
            server.stop()
            with kept_port(server.port):
                run.until(lambda run: run.events("rollout_retried"), "retried rollout")
                with OpenEnvServer(action=TEXT, port=server.port) as second:
                    status = run.wait()
    assert status == 0, run.stderr
    assert second.resets
    assert not run.lines("poisoned.jsonl")
    assert not run.events("rollout_given_up")
    cause = run.events("rollout_retried")[0]["fields"]
    assert (cause["class"], cause["cause"].partition(":")[0]) == ("provider", "ConnectionLost")
    train = [trace for trace in run.traces() if trace.split == "train"]
    assert len(train) == 3 * 2 * 2
    # The environment gives 0.25 for each text: an episode without a reward never had one to give.
    assert all(trace.rewards["environment"] in (0.25, 0.5, 0.75) for trace in train)
