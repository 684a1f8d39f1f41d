"""TRL's side of `trl_channels`: ComposerGRPOTrainer on a run's task, in a separate process.

    python benchmarks/trl_channels_peer.py CONFIG POLICY OUTPUT --rows N

It reads the config of a run and trains all three channels of it inside of TRL: the same model,
episodes, hints, builtin teachers, losses, optimizer and rates. The output has `metrics.jsonl` and
the last policy under `checkpoints/`, as a run's.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vs_trl_peer
from datasets import Dataset

from composer_mesh.actors.learning.weight_update import learning_rate
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.configs.load import load_config
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.frameworks.trl.pairs import TeacherPairs
from composer_mesh.plugins.frameworks.trl.rollouts import TaskRollouts, episode_reward, episode_rows
from composer_mesh.plugins.frameworks.trl.trainer import ComposerGRPOTrainer
from composer_mesh.tasks.loading import make_task


class Rollouts(TaskRollouts):
    """Keeps what was played, for the recorder."""

    played: Sequence[Any] = ()

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any] | None]:
        found = super().__call__(prompts, trainer)
        traces, masks = found["trace"] or [], found["env_mask"] or []
        self.played = [
            SimpleNamespace(mask=mask, reward=trace.reward, success=trace.success)
            for trace, mask in zip(traces, masks, strict=True)
        ]
        return found


def train(config: Config, policy: Path, output: Path, rows: int) -> None:
    """Train as many steps as the run would."""
    (output / "checkpoints").mkdir(parents=True)
    task, tokenizer, model = make_task(config), load_tokenizer(policy), load_model(policy)
    trainer, steps = config.trainer, config.run.steps
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trainer.lr,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        weight_decay=trainer.weight_decay,
        fused=True,
    )
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(trainer, step, steps) / trainer.lr
    )
    rollouts = Rollouts(task, tokenizer, max_context=config.policy.max_context)
    kept = WeightedPreferenceConfig.model_fields
    ComposerGRPOTrainer(
        model=model,
        reward_funcs=episode_reward,
        args=vs_trl_peer.settings(config, output, rows),
        train_dataset=Dataset.from_list(episode_rows(steps * config.schedule.prompts_per_step)),
        processing_class=tokenizer,
        rollout_func=rollouts,
        optimizers=(optimizer, rates),
        callbacks=[vs_trl_peer.Recorder(output, rollouts, steps)],
        sdpo=config.sdpo,
        replay=WeightedPreferenceConfig(**config.replay.model_dump(include=set(kept))),
        pairs=TeacherPairs(
            config.replay.teachers,
            task=task,
            overrides=[
                f"replay.ask={config.replay.ask}",
                f"replay.states_per_step={config.replay.states_per_step}",
                f"replay.gate.min_value={config.replay.gate.min_value}",
            ],
        ),
        max_context=config.policy.max_context,
    ).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "policy", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(load_config(options.config), options.policy, options.output, options.rows)


if __name__ == "__main__":
    main()
