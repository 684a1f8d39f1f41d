"""TRL's side of `vs_trl`: GRPOTrainer on a run's task, in a separate process.

    python benchmarks/vs_trl_peer.py CONFIG POLICY OUTPUT --save-every N --rows N

It reads the config of a run and trains what that run would: the same model, episodes in the same
order, rewards, loss, optimizer and rates. Episodes have several turns, so they use TRL's
`rollout_func`; tokens are sampled by TRL's own generation. The output has the files of a run:
`metrics.jsonl` and `checkpoints/step-N`. An interrupted training continues from the last of them,
with `transformers`' own state of it, which is in `trl`.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer
from vs_trl_episodes import Played, Player

from composer_mesh.actors.learning.weight_update import learning_rate
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.configs.advantages import GroupAdvantage
from composer_mesh.configs.load import load_config
from composer_mesh.configs.losses import GrpoLoss
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.loading import make_task


class Rollouts:
    """The run's episodes as TRL's `rollout_func`; a prompt is the number of its episode."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._task = make_task(config)
        chat = ChatFormat(tokenizer, self._task.tools)
        self._player = Player(config, self._task, chat)
        self.played: list[Played] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        def sample(contexts: list[list[int]]) -> list[list[int]]:
            answers: list[list[int]] = trainer._generate_single_turn(contexts, None, {}, 1)[0]
            return answers

        episodes = [self._task.episode("train", int(prompt)) for prompt in prompts]
        played = self._player.play(episodes, sample)
        self.played = played
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.ids for one in played],
            "env_mask": [one.mask for one in played],
            "logprobs": None,
            "reward": [one.reward for one in played],
        }


def given(**columns: Any) -> list[float]:
    """Return the rewards of the episodes."""
    rewards: list[float] = columns["reward"]
    return rewards


class Recorder(TrainerCallback):
    """Writes the files of a run: a line for each step, and a policy at intervals."""

    def __init__(self, output: Path, rollouts: Any, save_every: int) -> None:
        """`rollouts.played` are the last step's episodes."""
        self._output, self._rollouts, self._save_every = output, rollouts, save_every
        self._began = 0.0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Forget the steps after the checkpoint that training continues from."""
        metrics = self._output / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text().splitlines(keepends=True)
            metrics.write_text("".join(lines[: state.global_step]))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **given: Any) -> None:
        played = self._rollouts.played
        line = {
            "step": state.global_step,
            "tokens/trained": sum(sum(one.mask) for one in played),
            "reward/mean": statistics.mean(one.reward for one in played),
            "reward/success": statistics.mean(one.success for one in played),
            "time/step_s": time.perf_counter() - self._began,
        }
        with (self._output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._save_every and state.global_step % self._save_every == 0:
            folder = self._output / "checkpoints" / f"step-{state.global_step}"
            draft = folder.with_name(f".{folder.name}")
            given["model"].save_pretrained(draft)
            given["processing_class"].save_pretrained(draft)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)


def settings(config: Config, output: Path, rows: int, save_every: int = 0) -> GRPOConfig:
    """Convert the run's settings to TRL's; `rows` sequences share a forward and backward."""
    loss, advantage, schedule = config.loss, config.advantage, config.schedule
    if not isinstance(loss, GrpoLoss) or not isinstance(advantage, GroupAdvantage):
        raise SystemExit("vs_trl compares GRPO with group advantages: leave both sections as set")
    batch = schedule.prompts_per_step * schedule.group_size
    return GRPOConfig(
        output_dir=str(output / "trl"),
        max_steps=config.run.steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // rows,
        num_generations=schedule.group_size,
        max_completion_length=config.generator.max_new_tokens,  # of one turn
        temperature=config.generator.temperature,
        max_grad_norm=config.trainer.grad_clip,
        beta=0.0,
        loss_type=loss.aggregation,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        scale_rewards=advantage.scale,
        shuffle_dataset=False,
        seed=config.run.seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=config.trainer.compute_dtype == "bfloat16",
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or 1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )


def train(
    config: Config, policy: Path, output: Path, save_every: int, rows: int, rollouts: Any = None
) -> None:
    """Train as many steps as the run would, on TRL's own rollouts unless others are given."""
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    tokenizer, model = load_tokenizer(policy), load_model(policy)
    rollouts, trainer = rollouts or Rollouts(config, tokenizer), config.trainer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=trainer.lr,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        weight_decay=trainer.weight_decay,
        fused=True,
    )
    steps = config.run.steps
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(trainer, step, steps) / trainer.lr
    )
    episodes = steps * config.schedule.prompts_per_step
    peer = GRPOTrainer(
        model=model,
        reward_funcs=given,
        args=settings(config, output, rows, save_every),
        train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(episodes)]}),
        processing_class=tokenizer,
        rollout_func=rollouts,
        optimizers=(optimizer, rates),
        callbacks=[Recorder(output, rollouts, save_every)],
    )
    peer.train(resume_from_checkpoint=get_last_checkpoint(peer.args.output_dir))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("config", "policy", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    train(config, arguments.policy, arguments.output, arguments.save_every, arguments.rows)


if __name__ == "__main__":
    main()
