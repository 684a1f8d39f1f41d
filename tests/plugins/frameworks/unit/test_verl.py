"""What verl calls: names, advantages, a step on its engine, its agent loop; docs/verl.md."""

import asyncio
import dataclasses
import inspect
import random
from types import SimpleNamespace
from typing import Any

import fake_verl
import pytest
import torch
import yaml
from fake_verl import RECORDED, FakeEngine, actor_config
from guides import Guide, names_in_code
from step_batches import ALL_ON, batch_of
from verl_rows import answers_of, row_of, views_of

import composer_mesh.plugins.frameworks.verl.plugin  # noqa: F401 - as `import verl` does
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.losses.advantages import group_advantages
from composer_mesh.plugins.frameworks.verl import plugin
from composer_mesh.plugins.frameworks.verl.agent_loop import (
    TaskAgentLoop,
    verl_episode_rows,
    view_of,
)
from composer_mesh.plugins.frameworks.verl.algorithms import POLICY_LOSSES, grpo_composer
from composer_mesh.plugins.frameworks.verl.losses import PolicyAndSdpoLoss, VerlChannels
from composer_mesh.plugins.frameworks.verl.steps import verl_pair_step, verl_rows, verl_step
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.toolbox import ToolboxTask

RATE = 0.05
CHANNELS = VerlChannels(alpha=0.5, beta=0.3)


def test_the_entry_point_registers_every_name_of_the_guide() -> None:
    assert plugin.__name__ == "composer_mesh.plugins.frameworks.verl.plugin"
    assert list(fake_verl.ESTIMATORS.items()) == [("grpo_composer", grpo_composer)]
    assert set(fake_verl.POLICY_LOSSES) == {"composer_grpo", "composer_cispo", "composer_dppo"}
    assert fake_verl.AGENT_LOOPS["composer_mesh"]["_target_"].endswith("agent_loop.TaskAgentLoop")


def test_what_verl_calls_takes_what_it_passes() -> None:
    functions = RECORDED["functions"]
    for loss in POLICY_LOSSES.values():
        assert list(inspect.signature(loss).parameters) == functions["compute_policy_loss_vanilla"]
    passed = {"token_level_rewards", "response_mask", "index", "config"}
    assert passed <= set(inspect.signature(grpo_composer).parameters)
    assert passed <= set(functions["compute_grpo_vectorized_outcome_advantage"])
    shared = {"model_output", "data", "dp_group", "student_logits"}
    assert set(inspect.signature(PolicyAndSdpoLoss(None, CHANNELS)).parameters) == shared
    assert shared <= set(functions["distillation_ppo_loss"])


def test_the_estimator_has_our_advantages_for_groups_in_any_order() -> None:
    rewards, mask = torch.zeros(5, 3), torch.ones(5, 3)
    rewards[:, -1] = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0])
    mask[2], mask[0, 2] = 0, 0
    found, returns = grpo_composer(rewards, mask, ["b", "a", "b", "a", "b"])
    first, second = group_advantages(torch.tensor([[0.0, 1.0], [1.0, 2.0]])).tolist()
    assert found[:, 0].tolist() == pytest.approx([second[0], first[0], 0.0, first[1], second[1]])
    assert found[0, 2] == found[2].sum() == 0, "no advantage where nothing is trained"
    assert torch.equal(found, returns)
    plain, _ = grpo_composer(rewards, mask, list("babab"), {"norm_adv_by_std_in_grpo": False})
    assert plain[1, 0] == -0.5
    with pytest.raises(ValueError, match="the key `uid`"):
        grpo_composer(rewards, mask)


@pytest.fixture
def theirs_and_ours(build_config: Any, build_model: Any) -> Any:
    """A batch, an engine, our step and the figures of ours on the same weights."""
    config = build_config(
        loss={"type": "grpo", "clip_low": 0.2, "clip_high": 0.2},
        trainer={"lr": RATE, "grad_clip": 1e9},
        **ALL_ON,
    )
    theirs, ours = build_model(1), build_model(1)
    batch = batch_of(ours, random.Random(2), samples=5, pairs=3)
    step = OptimizerStep(
        ours, None, config, optimizers=lambda w: [torch.optim.SGD(w.values(), lr=RATE)]
    )
    teacher = TeacherModel(ours, config.sdpo, 4096, follows=True)
    expected = step.run(batch, InlineSource(teacher, config.sdpo, batch.version))
    return batch, FakeEngine(theirs, RATE), ours, expected


def test_a_step_on_its_engine_is_our_step(theirs_and_ours: Any) -> None:
    batch, engine, ours, expected = theirs_and_ours
    rows = [row_of(one, views_of(batch, one)) for one in batch.samples]
    found = verl_step(engine, rows, batch.pairs, CHANNELS, actor_config())
    for name in ("loss/policy", "loss/sdpo", "loss/replay", "loss/total"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
        assert found[name] != 0
    for one, two in zip(ours.parameters(), engine.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_a_teacher_of_the_whole_vocabulary_as_top_k_is_the_whole_teacher(
    build_model: Any,
) -> None:
    found = []
    for top_k in (None, 400, 20):
        model = build_model(1)
        batch = batch_of(model, random.Random(2), samples=3)
        rows = [row_of(one, views_of(batch, one)) for one in batch.samples]
        channels = VerlChannels(alpha=0.5, top_k=top_k)
        found.append(verl_step(FakeEngine(model, RATE), rows, [], channels, actor_config()))
    whole, every, narrow = (one["loss/sdpo"] for one in found)
    assert every == pytest.approx(whole, abs=1e-4)
    assert 0 < narrow < whole, "an f-divergence never grows when entries are merged"


def test_pairs_alone_are_a_mini_batch_whose_loss_falls(build_model: Any) -> None:
    model = build_model(1)
    batch = batch_of(model, random.Random(2), samples=1, pairs=4)
    engine = FakeEngine(model, RATE)
    first, second = (verl_pair_step(engine, batch.pairs, CHANNELS)["loss/replay"] for _ in range(2))
    assert first == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-5)
    assert second < first


def test_pairs_without_a_reference_or_a_weight_are_refused(build_model: Any) -> None:
    model = build_model(1)
    (pair, *_) = batch_of(model, random.Random(2), samples=2, pairs=1).pairs
    bare = dataclasses.replace(pair, reference=None)
    with pytest.raises(ValueError, match="no reference log-probs"):
        verl_pair_step(FakeEngine(model, RATE), [bare], CHANNELS)
    with pytest.raises(ValueError, match="so pairs teach nothing"):
        verl_pair_step(FakeEngine(model, RATE), [pair], VerlChannels())


def test_a_step_in_which_nothing_is_trained_is_refused(build_model: Any) -> None:
    model = build_model(1)
    batch = batch_of(model, random.Random(2), samples=1)
    row = row_of(batch.samples[0], [])
    screened = dataclasses.replace(row, response_mask=[0] * len(row.response_mask))
    with pytest.raises(ValueError, match="no response id of the step is trained"):
        verl_step(FakeEngine(model, RATE), [screened], [], CHANNELS, actor_config())


def test_logits_of_a_part_of_the_sequence_are_refused() -> None:
    data = {"input_ids": torch.nested.as_nested_tensor([torch.arange(4)], layout=torch.jagged)}
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size 1"):
        PolicyAndSdpoLoss(None, CHANNELS)(data=data, student_logits=torch.zeros(1, 2, 8))


class Servers:
    """verl's client of its inference servers, with scripted answers."""

    def __init__(self, chat: ChatFormat, answers: list[str]) -> None:
        self._chat, self._answers = chat, answers
        self.requests: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        ids = self._chat.action(self._answers[len(self.requests)])[: sampling_params["max_tokens"]]
        self.requests.append((prompt_ids, sampling_params))
        await asyncio.sleep(0)
        return fake_verl.recorded_class("TokenOutput")(
            token_ids=ids, log_probs=[-1.0] * len(ids), extra_fields={}
        )


def loop_of(tokenizer: Any, servers: Servers, prompt: int = 400, response: int = 400) -> Any:
    rollout = SimpleNamespace(prompt_length=prompt, response_length=response)
    config = SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    )
    settings = {"seed": 3, "tool_error_penalty": 0.1}
    return TaskAgentLoop(config, servers, tokenizer, None, None, None, settings=settings)


async def test_an_episode_is_trained_by_the_ids_that_were_sampled(
    toolbox: ToolboxTask, tokenizer: Any
) -> None:
    chat = ChatFormat(tokenizer, toolbox.tools)
    said = answers_of(toolbox)
    servers = Servers(chat, said)
    (row,) = verl_episode_rows(1)
    output = await loop_of(tokenizer, servers).run({"temperature": 1.0}, **row)
    whole = output.prompt_ids + output.response_ids
    last, sampling = servers.requests[-1]
    assert last == whole[: len(last)], "every turn was asked with the ids that are trained"
    assert sampling["max_tokens"] < 400
    trained = [i for i, one in zip(output.response_ids, output.response_mask, strict=True) if one]
    assert trained == [token for text in said for token in chat.action(text)]
    assert {
        p for p, one in zip(output.response_logprobs, output.response_mask, strict=True) if one
    } == {-1.0}
    assert output.reward_score == pytest.approx(0.9)
    assert output.num_turns == 2 * len(said)


async def test_an_error_is_a_hinted_view_and_a_mask(toolbox: ToolboxTask, tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer, toolbox.tools)
    said = answers_of(toolbox)
    output = await loop_of(tokenizer, Servers(chat, said)).run({}, **verl_episode_rows(1)[0])
    (fields,) = output.extra_fields["hint_views"]
    view, whole = view_of(fields), output.prompt_ids + output.response_ids
    assert [whole[row + 1] for row in view.student_rows] == view.targets == chat.action(said[0])
    assert [view.teacher_ids[row + 1] for row in view.teacher_rows] == view.targets
    assert view.offset > 0
    wrong = [
        i
        for i, one in zip(output.response_ids, output.extra_fields["error_mask"], strict=True)
        if one
    ]
    assert wrong == view.targets


async def test_a_response_that_is_full_ends_the_episode(
    toolbox: ToolboxTask, tokenizer: Any
) -> None:
    chat = ChatFormat(tokenizer, toolbox.tools)
    servers = Servers(chat, answers_of(toolbox))
    output = await loop_of(tokenizer, servers, response=12).run({}, **verl_episode_rows(1)[0])
    assert len(output.response_ids) <= 12
    assert len(servers.requests) == 1
    assert not output.extra_fields["success"]


async def test_a_row_without_an_episode_and_a_long_prompt_are_refused(
    toolbox: ToolboxTask, tokenizer: Any
) -> None:
    servers = Servers(ChatFormat(tokenizer, toolbox.tools), [])
    with pytest.raises(ValueError, match="make the rows of the data set with verl_episode_rows"):
        await loop_of(tokenizer, servers).run({}, extra_info={"index": 3})
    with pytest.raises(ValueError, match=r"rollout\.prompt_length is 5"):
        await loop_of(tokenizer, servers, prompt=5).run({}, **verl_episode_rows(1)[0])


def test_padded_batches_of_verl_become_rows() -> None:
    batch = {
        "prompts": torch.tensor([[0, 7, 8]]),
        "responses": torch.tensor([[5, 6, 9, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1, 0]]),
        "old_log_probs": torch.full((1, 4), -1.0),
        "advantages": torch.full((1, 4), 0.5),
    }
    fields = {
        "turn": 0,
        "teacher_ids": [7, 3, 8, 5],
        "student_rows": [1],
        "teacher_rows": [2],
        "targets": [5],
    }
    (row,) = verl_rows(SimpleNamespace(batch=batch, non_tensor_batch={"hint_views": [[fields]]}))
    assert row.ids == [7, 8, 5, 6, 9]
    assert row.response_mask == [1, 0, 1]
    assert row.advantages == [0.5] * 3
    assert row.views[0].targets == [5]


PAGE = Guide.read("verl.md")
THEIRS = {"adv_estimator", "actor_rollout_ref", "policy_loss", "default_agent_loop", "train_files"}
THEIRS |= {"agent_loop_config_path", "reward_score", "compute_topk_loss", "train_batch"}
THEIRS |= {"compute_advantage", "non_tensor_batch", "pad_to_length", "loss_agg_mode", "loss_mode"}
THEIRS |= set(RECORDED["functions"])


def test_every_name_on_the_page_exists() -> None:
    assert PAGE.names() - names_in_code() - THEIRS == set()


def test_the_agent_loop_of_the_page_takes_its_keys(tokenizer: Any, write_module: Any) -> None:
    write_module("my_package", "")
    (block,) = PAGE.blocks("yaml")
    (entry,) = yaml.safe_load(block)
    assert entry.pop("_target_") == f"{TaskAgentLoop.__module__}.{TaskAgentLoop.__qualname__}"
    assert entry.pop("name") == "composer_mesh"
    rollout = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace()))
    own = {**entry, "task": "toolbox", "options": {}}
    loop = TaskAgentLoop(SimpleNamespace(config=rollout), None, tokenizer, None, None, None, **own)
    assert loop._task.settings.max_turns == 6
    own["settings"] = {"no_such_setting": 1}
    with pytest.raises(TypeError, match="setting"):
        TaskAgentLoop(SimpleNamespace(config=rollout), None, tokenizer, None, None, None, **own)


def test_the_steps_of_the_page_run(build_model: Any) -> None:
    model = build_model(1)
    batch = batch_of(model, random.Random(2), samples=2, pairs=2)
    ids = batch.samples[1].ids
    view = next(one for one in batch.views if one.trace_id == "t1")
    names = ("turn", "teacher_ids", "student_rows", "teacher_rows", "targets")
    count = len(ids) - 1
    padded = {
        "prompts": torch.tensor([ids[:1]]),
        "responses": torch.tensor([ids[1:]]),
        "attention_mask": torch.ones(1, len(ids)),
        "response_mask": torch.ones(1, count),
        "old_log_probs": torch.full((1, count), -3.0),
        "advantages": torch.ones(1, count),
    }
    fields = [[{name: getattr(view, name) for name in names}]]
    found: dict[str, Any] = {
        "engine": FakeEngine(model, 0.05),
        "data": SimpleNamespace(batch=padded, non_tensor_batch={"hint_views": fields}),
        "pairs": batch.pairs,
        "actor": actor_config(),
    }
    rows, step, alone = PAGE.blocks("python")
    exec(rows, found)
    assert len(found["rows"]) == 800
    exec(step, found)
    assert found["figures"]["loss/sdpo"] > 0
    exec(alone, found)
    assert found["figures"]["loss/replay"] > 0
