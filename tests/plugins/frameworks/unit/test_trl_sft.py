"""Our SFT and our epochs of one batch against TRL's own."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.rollouts.batches import PolicySample, StepBatch
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


ITERATION_RATE, LOW, HIGH = 0.05, 0.2, 0.28
ANSWERS = [[20 + at * 7 % 90, 30 + at, 11, 40 + 3 * at][: 2 + at % 3] for at in range(8)]
REWARDS = [0.0, 1.0, 0.5, 1.0, 0.2, 0.0, 1.0, 0.0]


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_two_epochs_are_two_iterations_of_trl(
    build_config: Any,
    build_model: Any,
    tokenizer: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = build_model(1)
    ours = copy.deepcopy(model)
    theirs = trained_by_trl(model, tokenizer, str(tmp_path))
    config = build_config(
        loss={"type": "grpo", "aggregation": "dapo", "clip_low": LOW, "clip_high": HIGH},
        trainer={"lr": ITERATION_RATE, "grad_clip": 1e9, "epochs": 2},
        sdpo={"alpha": 0.0},
        replay={"beta": 0.0},
    )
    step = OptimizerStep(
        ours, None, config, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=ITERATION_RATE)]
    )
    found = step.run(batch_of(theirs.inputs), None)
    assert theirs.clipped[0] == 0
    assert theirs.clipped[1] > 0.05
    assert found["loss/policy"] == pytest.approx(sum(theirs.losses) / 2, abs=1e-5)
    assert found["policy/clipped_fraction"] == pytest.approx(sum(theirs.clipped) / 2, abs=1e-5)
    pairs = zip(ours.parameters(), model.parameters(), strict=True)
    assert max(float((one - two).abs().max()) for one, two in pairs) < 1e-5


def trained_by_trl(model: Any, tokenizer: Any, folder: str) -> Any:
    """TRL's trainer after two iterations on one batch, with its inputs, losses and figures."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class Scripted(trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        """Its model always says the same; what it is trained on is real."""

        inputs: Any = None

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            assert len(prompt_ids) == len(ANSWERS)
            return [list(one) for one in ANSWERS], None

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.inputs = self.inputs or {
                name: one.clone() for name, one in inputs.items() if isinstance(one, torch.Tensor)
            }
            loss = super()._compute_loss(model, inputs)
            self.losses.append(float(loss))
            self.clipped.append(float(self._metrics["train"]["clip_ratio/region_mean"][-1]))
            return loss

    settings = trl.GRPOConfig(
        output_dir=folder,
        max_steps=2,
        num_iterations=2,
        per_device_train_batch_size=len(ANSWERS),
        num_generations=4,
        max_completion_length=8,
        loss_type="bnpo",
        epsilon=LOW,
        epsilon_high=HIGH,
        beta=0.0,
        temperature=1.0,
        max_grad_norm=1e9,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=ITERATION_RATE)
    trainer = Scripted(
        model=model,
        args=settings,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"prompt": "use"}, {"prompt": "the tool"}]),
        reward_funcs=lambda completions, **_: REWARDS[: len(completions)],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.losses, trainer.clipped = [], []
    trainer.train()
    return trainer


def batch_of(inputs: dict[str, Any]) -> StepBatch:
    """The batch that TRL trained, with the log-probs of its start as those of sampling."""
    samples = []
    for row, advantage in enumerate(inputs["advantages"].tolist()):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        own = inputs["completion_mask"][row].bool()
        answer = inputs["completion_ids"][row][own].tolist()
        sampled = inputs["old_per_token_logps"][row][own].tolist()
        before = len(prompt)
        samples.append(
            PolicySample(
                f"t{row}",
                [*prompt, *answer],
                [False] * before + [True] * len(answer),
                [0.0] * before + sampled,
                advantage,
                [-1] * before + [0] * len(answer),
                group_id=row // 4,
            )
        )
    return StepBatch(0, samples, [], [])
