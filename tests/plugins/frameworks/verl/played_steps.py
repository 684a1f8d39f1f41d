"""Episodes by verl's AgentLoopWorker, its trainer's advantages, three steps; prints them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

import cpu_engine
import numpy as np
import verl
from engine_steps import actor
from hydra import compose, initialize_config_dir
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.rollout.replica import TokenOutput
from verl_rows import answers_of

from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.plugins.frameworks.verl.agent_loop import verl_episode_rows
from composer_mesh.plugins.frameworks.verl.losses import VerlChannels
from composer_mesh.plugins.frameworks.verl.steps import verl_rows, verl_step
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

EPISODES, GROUP = 2, 2
PROMPT, RESPONSE = 700, 500


class Client:
    """verl's client of its servers: of each prompt's rollouts one errs and solves, one guesses."""

    def __init__(self, chat: ChatFormat, task: ToolboxTask) -> None:
        self._chat, self._task = chat, task
        self._scripts: dict[str, list[str]] = {}
        self._seen: dict[tuple[int, ...], int] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        if request_id not in self._scripts:
            self._scripts[request_id] = self._script(tuple(prompt_ids))
        text = self._scripts[request_id].pop(0)
        ids = self._chat.action(text)[: sampling_params["max_tokens"]]
        return TokenOutput(token_ids=ids, log_probs=[-2.0] * len(ids))

    def _script(self, prompt: tuple[int, ...]) -> list[str]:
        number = self._seen[prompt] = self._seen.get(prompt, -1) + 1
        if number:
            return ["Answer: no idea"]
        return next(
            answers_of(self._task, index)
            for index in range(EPISODES)
            if tuple(self._chat.first_prompt(self._opening(index))) == prompt
        )

    def _opening(self, index: int) -> Any:
        from composer_mesh.tasks.playing import SyncSession

        with SyncSession(self._task, self._task.episode("train", index)) as session:
            return session.messages


def settings(folder: Path) -> Any:
    """verl's own configuration with its defaults, for the policy in a folder."""
    here = Path(__file__).parent
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config")):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
                f"actor_rollout_ref.rollout.response_length={RESPONSE}",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.agent.default_agent_loop=composer_mesh",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={here}/agent_loops.yaml",
                "algorithm.adv_estimator=grpo_composer",
            ],
        )


def prompts() -> Any:
    """A batch of prompts as verl's data set and trainer make it."""
    rows = [row for row in verl_episode_rows(EPISODES) for _ in range(GROUP)]
    columns = {
        "raw_prompt": [row["prompt"] for row in rows],
        "agent_name": [row["agent_name"] for row in rows],
        "extra_info": [row["extra_info"] for row in rows],
        "index": [row["extra_info"]["index"] for row in rows],
        "uid": [row["extra_info"]["episode"] for row in rows],
    }
    filled = {}
    for name, values in columns.items():
        filled[name] = np.empty(len(values), dtype=object)
        filled[name][:] = values
    return verl.DataProto(batch=None, non_tensor_batch=filled, meta_info={"global_steps": 1})


async def main() -> None:
    folder = Path(sys.argv[1])
    task = ToolboxTask.create(TaskSettings(seed=3, tool_error_penalty=0.1))
    client = Client(ChatFormat(load_tokenizer(folder), task.tools), task)
    config = settings(folder)
    played = await AgentLoopWorker(config, client).generate_sequences(prompts())
    played.batch["token_level_rewards"] = played.batch["rm_scores"]
    played.batch["old_log_probs"] = played.batch["rollout_log_probs"]
    name = config.algorithm.adv_estimator
    rows = verl_rows(compute_advantage(played, name, config=config.algorithm))
    engine = cpu_engine.engine_on_cpu(folder, 0.05, tokens=2 * (PROMPT + RESPONSE))
    with engine.train_mode():
        steps = [verl_step(engine, rows, [], VerlChannels(alpha=0.5), actor()) for _ in range(3)]
    found = {
        "rewards": played.batch["rm_scores"].sum(-1).tolist(),
        "success": [bool(one) for one in played.non_tensor_batch["success"]],
        "views": [len(row.views) for row in rows],
        "advantages": [row.advantages[0] for row in rows],
        "steps": steps,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
