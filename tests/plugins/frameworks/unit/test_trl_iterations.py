"""`trainer.epochs = 2` is TRL's `num_iterations = 2`: losses, clipped fractions and weights."""

import copy
from typing import Any

import pytest
import torch

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.rollouts.batches import PolicySample, StepBatch

RATE, LOW, HIGH = 0.05, 0.2, 0.28
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
        trainer={"lr": RATE, "grad_clip": 1e9, "epochs": 2},
        sdpo={"alpha": 0.0},
        replay={"beta": 0.0},
    )
    step = OptimizerStep(
        ours, None, config, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=RATE)]
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
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
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
