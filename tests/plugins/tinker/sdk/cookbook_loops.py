"""Runs a training loop of tinker-cookbook, unchanged, on data of this file: dpo, rl or distill.

Prompts and answers are token ids, so that no renderer of a model family is needed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz
import numpy as np
import tinker
from tinker import types
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.rl import train as train_rl
from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from tinker_cookbook.supervised.types import (
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)

WANTED, PROMPT, STEPS = 7, [5, 6], 6


class WantsOneToken(Env):
    """Rewards answers by their share of one token."""

    async def initial_observation(self) -> Any:
        return types.ModelInput.from_ints(PROMPT), [1]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        del extra
        share = action.count(WANTED) / max(1, len(action))
        return StepResult(share, True, types.ModelInput.from_ints([]), [])


class Group(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [WantsOneToken() for _ in range(16)]


class Groups(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(), Group()]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class GroupsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return Groups(), None


def side(answer: list[int]) -> tinker.Datum:
    ids = [*PROMPT, *answer]
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(answer)
    inputs = {
        "target_tokens": types.TensorData.from_numpy(np.array(ids[1:])),
        "weights": types.TensorData.from_numpy(np.array(weights, np.float32)),
    }
    return tinker.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


class Pairs(SupervisedDataset):
    def get_batch(self, index: int) -> list[tinker.Datum]:
        rng = np.random.default_rng(index)
        pairs = [([WANTED] * 4, rng.integers(10, 60, 4).tolist()) for _ in range(4)]
        return [side(answer) for pair in pairs for answer in pair]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class PairsBuilder(ChatDatasetBuilder):
    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return Pairs(), None


def main(url: str, model: str, loop: str, folder: str) -> None:
    shared: dict[str, Any] = {
        "model_name": model,
        "recipe_name": "local",
        "log_path": folder,
        "base_url": url,
        "lora_rank": 8,
        "eval_every": 0,
        "save_every": 3,
    }
    if loop == "dpo":
        common = ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=model, renderer_name="", max_length=None, batch_size=4
        )
        pairs = PairsBuilder(common_config=common)
        train_dpo.main(train_dpo.Config(dataset_builder=pairs, learning_rate=3e-3, **shared))
    elif loop == "rl":
        more: dict[str, Any] = {"dataset_builder": GroupsBuilder(), "max_tokens": 8}
        asyncio.run(train_rl.main(train_rl.Config(learning_rate=1e-2, **more, **shared)))
    else:
        teacher = TeacherConfig(base_model=model)
        data = DistillationDatasetConfig(
            dataset_builder=GroupsBuilder(), teacher_config=teacher, groups_per_batch=2
        )
        distil = train_on_policy.Config(
            dataset_configs=[data], max_tokens=8, learning_rate=1e-3, **shared
        )
        asyncio.run(train_on_policy.main(distil))
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    print(json.dumps([json.loads(line) for line in lines]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
