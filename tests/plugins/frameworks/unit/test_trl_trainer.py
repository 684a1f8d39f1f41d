"""TRL's trainer with three channels: its losses are ours, and without them it is TRL's own."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_batches import ALL_ON
from trl_runs import GROUP, PROMPTS, last_log, make_trainer, pair_rows

from composer_mesh.actors.learning.replay_channel import answer_logprobs
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.channels.policy import policy_sample
from composer_mesh.configs.channels import ChannelSchedule
from composer_mesh.configs.preference import WeightedPreferenceConfig as PairLoss
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.sdpo import HintsConfig, HintWriterConfig, SdpoConfig
from composer_mesh.plugins.frameworks.trl.checks import check_channels
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = [pytest.mark.filterwarnings("ignore")]  # of TRL and what it imports
RATE = 0.05
WRITER = HintWriterConfig(kind="builtin")
SDPO, REPLAY = SdpoConfig(alpha=0.5), PairLoss(beta=0.3)
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def make(
    toolbox: ToolboxTask, tokenizer: Any, build_model: Callable[[int], Any], tmp_path: Path
) -> Make:
    """A trainer by its options, on a model of seed 1, with stored pairs."""
    from composer_mesh.plugins.frameworks.trl.pairs import StoredPairs

    def build(**options: Any) -> Any:
        model = options.pop("model", None) or build_model(1)
        if not options.get("plain"):
            stored = StoredPairs(pair_rows(toolbox), per_step=3)
            options = {"sdpo": SDPO, "replay": REPLAY, "pairs": stored, **options}
        return make_trainer(toolbox, tokenizer, model, tmp_path / "out", **options)

    return build


def weights_of(trainer: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for one in trainer.model.parameters()]


def farthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def our_step(model: Any, seen: list[Any], build_config: Any) -> dict[str, Any]:
    """Our own step on the batch that TRL has trained, from the same weights."""
    config = build_config(
        loss={"type": "grpo", "aggregation": "dapo"},
        trainer={"lr": RATE, "grad_clip": 1e9},
        sdpo={"alpha": SDPO.alpha},
        replay={**ALL_ON["replay"], "beta": REPLAY.beta},
    )
    samples, views, pairs, own = [], [], list[PairSample](), LanguageModel(model)
    for inputs in seen:
        part = inputs["composer_part"]
        pairs += part.pairs
        for row, of_row in enumerate(part.rows):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            shown = inputs["completion_mask"][row].bool()
            ids = prompt + inputs["completion_ids"][row][shown].tolist()
            mask = [False] * len(prompt) + inputs["tool_mask"][row][shown].bool().tolist()
            name = f"t{len(samples)}"
            views += [replace(view, trace_id=name) for view in of_row]
            sampled = torch.tensor([mask[1:]])
            with torch.no_grad():
                found = own.logprobs(own.hidden([ids]), torch.tensor([ids]), sampled)[0]
            sample = policy_sample(trace_of(name, ids, mask), float(inputs["advantages"][row]))
            samples.append(replace(sample, logprobs=[0.0, *found.tolist()]))
    with torch.no_grad():
        sides = answer_logprobs(own, pairs)
    scores = list(zip(*(side.tolist() for side in sides), strict=True))
    scored = [replace(one, reference=score) for one, score in zip(pairs, scores, strict=True)]
    teacher = TeacherModel(model, config.sdpo, 4096, follows=True)
    step = OptimizerStep(
        model, None, config, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=RATE)]
    )
    batch = StepBatch(0, samples, views, scored)
    return step.run(batch, InlineSource(teacher, config.sdpo, 0))


def trace_of(name: str, ids: list[int], mask: list[bool]) -> Any:
    from composer_mesh.plugins.frameworks.trl.traces import Completion, trace_of_completion

    first = mask.index(True)
    row = Completion(ids[:first], ids[first:], mask[first:], [], [])
    return trace_of_completion(row, name, 0, 0, [], None)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_figures_and_weights_are_those_of_our_own_step(
    make: Make, build_model: Any, build_config: Any, accumulated: int
) -> None:
    trainer = make(settings_of={"gradient_accumulation_steps": accumulated})
    trainer.train()
    ours = build_model(1)
    found, theirs = our_step(ours, trainer.seen, build_config), last_log(trainer)
    assert len(trainer.seen) == accumulated
    for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total"):
        assert theirs[name] == pytest.approx(found[name], abs=1e-5)
        assert theirs[name] != 0, name
    for name in (
        "replay/accuracy",
        "replay/margin",
        "sdpo/student_entropy",
        "sdpo/teacher_entropy",
    ):
        assert theirs[name] == pytest.approx(found[name], abs=1e-4)
    assert theirs["loss"] == pytest.approx(theirs["loss/total"], abs=1e-5)
    assert theirs["replay/pairs"] == 3
    assert theirs["sdpo/tokens"] > 10
    assert farthest(list(ours.parameters()), weights_of(trainer)) < 1e-5
    assert farthest(list(build_model(1).parameters()), weights_of(trainer)) > 1e-3


def test_two_steps_of_a_generation_have_the_pairs_and_the_divisors_of_their_own(
    make: Make,
) -> None:
    trainer = make(
        steps=2,
        settings_of={
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 2,
            "per_device_train_batch_size": GROUP * PROMPTS // 2,
        },
    )
    trainer.train()
    parts = [inputs["composer_part"] for inputs in trainer.seen]
    assert [len(part.pairs) for part in parts] == [3, 3]
    for part in parts:
        assert part.sdpo_tokens == sum(len(v.targets) for row in part.rows for v in row)
    assert parts[0].sdpo_tokens != parts[1].sdpo_tokens


def test_a_rollout_that_trl_masks_as_truncated_is_taught_nothing(make: Make) -> None:
    trainer = make(longest=220, settings_of={"mask_truncated_completions": True})
    trainer.train()
    (inputs,) = trainer.seen
    kept = inputs["completion_mask"].bool().any(-1).tolist()
    views = [bool(row) for row in inputs["composer_part"].rows]
    assert False in kept
    assert not any(has for has, trained in zip(views, kept, strict=True) if not trained)
    assert any(views)


def test_with_both_channels_off_every_weight_is_trls_own(make: Make) -> None:
    options = {"steps": 2, "settings_of": {"gradient_accumulation_steps": 2}}
    theirs = make(plain=True, **options)
    theirs.train()
    ours = make(sdpo=None, replay=None, pairs=None, **options)
    ours.train()
    pairs = zip(weights_of(ours), weights_of(theirs), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    logged = [last_log(one) for one in (ours, theirs)]
    assert logged[0].keys() == logged[1].keys()
    assert logged[0]["loss"] == logged[1]["loss"]


def test_the_end_token_learns_its_embedding_where_it_is_the_padding_too(
    make: Make, tokenizer: Any, build_model: Callable[[int], Any]
) -> None:
    found = []
    for padding in (None, tokenizer.eos_token_id):
        model = build_model(1)
        model.get_input_embeddings().padding_idx = padding
        trainer = make(model=model)
        trainer.train()
        found.append(weights_of(trainer))
    assert farthest(*found) == 0


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(
    make: Make, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    taid = SdpoConfig(alpha=0.5, objective="taid")
    whole = make(steps=3, settings_of=saving, sdpo=taid)
    whole.train()
    rest = make(steps=3, settings_of=saving, sdpo=taid)
    rest.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    pairs = zip(weights_of(rest), weights_of(whole), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert last_log(rest)["sdpo/taid_t"] == last_log(whole)["sdpo/taid_t"] > 0.4
    assert [p.pair_id for p in rest.seen[0]["composer_part"].pairs] == [
        p.pair_id for p in whole.seen[4]["composer_part"].pairs
    ]


def test_adapters_of_peft_train_alone_and_their_base_is_the_reference(
    make: Make, build_model: Any
) -> None:
    from peft import LoraConfig

    model = build_model(1)
    before = copy.deepcopy(model.state_dict())
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    trainer = make(model=model, peft_config=peft, steps=2, optimizers=(None, None))
    trainer.train()
    first, last = (one for one in trainer.state.log_history if "loss" in one)
    assert first["loss/replay"] == pytest.approx(0.6931, abs=1e-3), "adapters begin at nothing"
    assert last["loss/replay"] != first["loss/replay"]
    assert last["loss/sdpo"] > 0
    after = trainer.model.get_base_model().state_dict()
    kept = {
        name.replace(".base_layer", ""): one for name, one in after.items() if "lora" not in name
    }
    assert all(torch.equal(kept[name], one) for name, one in before.items())


@pytest.mark.parametrize("output", ["topk", "full", "sampled"])
def test_every_teacher_output_and_a_frozen_teacher_can_be_trained(make: Make, output: str) -> None:
    trainer = make(sdpo=SdpoConfig(alpha=0.5, teacher_output=output, teacher="frozen"))
    trainer.train()
    assert last_log(trainer)["loss/sdpo"] != 0


def test_settings_that_trls_trainer_cannot_keep_are_refused_before_it_starts(make: Make) -> None:
    with pytest.raises(ValueError, match="'live' or 'frozen'"):
        make(sdpo=SdpoConfig(alpha=0.5, teacher="ema"))
    with pytest.raises(ValueError, match="no pairs"):
        make(pairs=None)
    with pytest.raises(ValueError, match="alpha_schedule changes alpha by the step of a run"):
        make(sdpo=SdpoConfig(alpha=0.5, alpha_schedule=ChannelSchedule(warmup_steps=2)))
    for unkept in ({"sites": "first"}, {"advantage_sites": 8}, {"max_update_share": 0.4}):
        with pytest.raises(ValueError, match="which only a run of composer-mesh keeps"):
            make(sdpo=SdpoConfig.model_validate({"alpha": 0.5, **unkept}))
    with pytest.raises(ValueError, match="asks a model to write hints"):
        make(sdpo=SdpoConfig(alpha=0.5, hints=HintsConfig(writer="llm", llm=WRITER)))
    with pytest.raises(ValueError, match="TRL has one optimizer"):
        check_channels(SdpoConfig(), ReplayConfig(update="own"), None)
