"""The losses of supervised steps are those of TRL's SFTTrainer on the same rows, step for step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.sft.config import sft_config
from composer_mesh.services.sft.run import Dataset, load_dataset
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = [pytest.mark.filterwarnings("ignore")]  # of TRL and what it imports
STEPS, BATCH, ROWS, RATE = 5, 4, 16, 0.01
ENDS_WITH_THE_STOP = """\
{%- for message in messages %}
{{- '' if loop.first else '\n' }}{{- '<|im_start|>' + message.role + '\n' + message.content }}
{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"""
"""A template that writes nothing behind the token that ends a turn, as rollouts have it."""


@pytest.fixture
def chat(tokenizer: Any) -> ChatFormat:
    own = copy.deepcopy(tokenizer)
    own.chat_template = ENDS_WITH_THE_STOP
    return ChatFormat(own, [])


@pytest.fixture
def rows(toolbox: ToolboxTask) -> list[dict[str, Any]]:
    """First turns of episodes as prompt and completion, of different lengths."""
    found = []
    for index in range(ROWS):
        messages = SyncSession(toolbox, toolbox.episode("train", index)).messages
        answer = {
            "role": "assistant",
            "content": f"So {toolbox.expert(messages)}"[: 20 + 5 * index],
        }
        found.append({"prompt": messages, "completion": [answer], "tools": []})
    return found


@pytest.fixture
def config(build_config: Any, rows: list[dict[str, Any]], tmp_path: Path) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"steps": STEPS, "batch_size": BATCH, "lr": RATE, "path": path}

    def build(**trainer: Any) -> Any:
        return sft_config(build_config(sft=sft, trainer={"microbatch_tokens": 512, **trainer}))

    return build


def in_order(dataset: Dataset, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order in which the steps train them, without our column."""
    samples = [one for step in range(STEPS) for one in dataset.batch(step).samples]
    numbers = [int(one.trace_id.split()[1]) for one in samples]
    return [{key: rows[n - 1][key] for key in ("prompt", "completion")} for n in numbers]


def theirs(
    model: Any, chat: ChatFormat, rows: list[dict[str, Any]], folder: Path, padding_free: bool
) -> list[float]:
    """Each step's loss of TRL, which accumulates the gradients of two microbatches."""
    import datasets
    import trl

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="linear",
        adam_beta2=0.95,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        padding_free=padding_free,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=chat.tokenizer,
    )
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def ours(model: Any, config: Any, dataset: Dataset) -> list[float]:
    """Each step's loss of the trainer's own step."""
    from composer_mesh.actors.learning.step import OptimizerStep

    step = OptimizerStep(model, None, config)
    return [float(step.run(dataset.batch(n), None)["loss/policy"] or 0) for n in range(STEPS)]


@pytest.mark.parametrize("padding_free", [False, True])
def test_losses_of_each_step_are_those_of_trl(
    padding_free: bool,
    build_model: Any,
    config: Any,
    chat: ChatFormat,
    rows: list[dict[str, Any]],
    toolbox: ToolboxTask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    dataset = load_dataset(config(), toolbox, chat, print)
    expected = theirs(build_model(1), chat, in_order(dataset, rows), tmp_path, padding_free)
    assert len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0]
    for packing in (False, True):
        for sharing in (False, True):
            how = config(packing=packing, prefix_sharing=sharing)
            assert ours(build_model(1), how, dataset) == pytest.approx(expected, abs=1e-5)
