"""TRL's trainer with three channels on the toolbox task, whose policy says what it is told to.

Everything but the sampling is real: rollouts, hints, losses, TRL's own step. TRL is imported when a
trainer is made.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import Task

GROUP, PROMPTS, LONGEST = 4, 2, 512
Answers = dict[tuple[int, ...], list[list[int]]]


def scripted_answers(
    task: Task, chat: ChatFormat, prompts: int = PROMPTS, group: int = GROUP, seed: int = 0
) -> Answers:
    """What a policy says to each context, in turn: experts and bunglers, some of them each."""
    answers: Answers = defaultdict(list)
    for index in range(prompts):
        for sample in range(group):
            rng = random.Random(f"{seed}:{index}:{sample}")
            session = SyncSession(task, task.episode("train", index))
            context, done = chat.first_prompt(session.messages), False
            while not done:
                messages = session.messages
                wrong = rng.random() < 0.2 + 0.2 * sample
                text = task.corrupted(messages, rng) if wrong else task.expert(messages)
                ids = chat.action(text)
                answers[tuple(context)].append(ids)
                step = session.step(chat.action_text(ids))
                done = step.done
                context = context + ids
                context += [] if done else chat.continuation(step.messages, ids)
    return answers


@dataclass
class Script:
    """Answers contexts; the same one asked again gets the next of its answers."""

    answers: Answers
    used: dict[tuple[int, ...], int] = field(default_factory=lambda: defaultdict(int))

    def __call__(self, contexts: Sequence[Sequence[int]]) -> tuple[list[list[int]], None]:
        said = []
        for context in map(tuple, contexts):
            every = self.answers[context]
            said.append(list(every[self.used[context] % len(every)]))
            self.used[context] += 1
        return said, None


def pair_rows(task: Task, count: int = 5) -> list[dict[str, Any]]:
    """Rows of TRL's preference format: the expert's first action over a bungler's."""
    rows = []
    for index in range(20, 20 + count):
        messages = SyncSession(task, task.episode("train", index)).messages
        wrong = task.corrupted(messages, random.Random(index))
        sides = {"chosen": task.expert(messages), "rejected": wrong}
        row = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
        rows.append({"prompt": messages, "state_id": f"s{index}", **row})
    return rows


def settings(folder: Path, **changes: Any) -> Any:
    """TRL's settings of a small run: all rows of a step in one microbatch, plain numbers."""
    from trl import GRPOConfig

    rows = GROUP * PROMPTS
    accumulated = changes.get("gradient_accumulation_steps", 1)
    options = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": rows // accumulated,
        "num_generations": GROUP,
        "max_completion_length": 64,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "beta": 0.0,
        "temperature": 1.0,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**options, **changes})


def make_trainer(
    task: Task,
    tokenizer: Any,
    model: Any,
    folder: Path,
    *,
    steps: int = 1,
    plain: bool = False,
    base: Any = None,
    longest: int = LONGEST,
    settings_of: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer on the scripted rollouts; `plain` is TRL's own class, `base` another one."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from composer_mesh.plugins.frameworks.trl.rollouts import (
        TaskRollouts,
        episode_reward,
        episode_rows,
    )
    from composer_mesh.plugins.frameworks.trl.trainer import ComposerGRPOTrainer

    rollouts = TaskRollouts(task, tokenizer, max_context=longest)
    script = Script(scripted_answers(task, rollouts.chat))
    base = base or (GRPOTrainer if plain else ComposerGRPOTrainer)

    class Scripted(base):  # type: ignore[misc]
        """Its model always says what it is told."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            return script(prompt_ids)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            seen = getattr(self, "seen", [])
            self.seen = [*seen, inputs]
            return super()._compute_loss(model, inputs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = {
        "reward_funcs": episode_reward,
        "rollout_func": rollouts,
        "train_dataset": Dataset.from_list(episode_rows(PROMPTS) * steps),
        "optimizers": (optimizer, rates),
    }
    return Scripted(
        model=model,
        args=settings(folder, **{"max_steps": steps, **(settings_of or {})}),
        processing_class=tokenizer,
        **{**rows, **options},
    )


def last_log(trainer: Any) -> dict[str, Any]:
    """The figures of the last optimizer step."""
    return dict(next(one for one in reversed(trainer.state.log_history) if "loss" in one))


def qwen_policy() -> tuple[Any, Any]:
    """Qwen3's own chat template over single bytes, and a random model, for TRL's tool loop."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=4096,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return tokenizer, model


def qwen_call(name: str, **arguments: Any) -> str:
    """What that policy writes to call a tool."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call><|im_end|>"
