"""The warm start: repeatable, cached whole or not at all, in the ids that a rollout would have."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.models.warm_start import (
    IGNORE,
    backward,
    collate,
    imitate,
    policy_folder,
    prepare_policy,
    warm_start,
)
from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.playing import Demonstration, Piece, SyncSession, demonstrate, encode
from composer_mesh.tasks.toolbox import ToolboxTask

Prepare = Callable[..., Config]
SMALL = {"steps": 2, "batch_size": 3, "demonstrations": 6, "error_rate": 0.5}


@pytest.fixture
def small(build_config: Any, tmp_path: Path) -> Prepare:
    """A config whose warm start takes a moment; keywords replace whole sections' keys."""

    def build(warm: dict[str, Any] | None = None, **sections: Any) -> Config:
        policy = {
            "cache_dir": tmp_path / "cache",
            "vocab_size": 320,
            "warm_start": {**SMALL, **(warm or {})},
            **sections.pop("policy", {}),
        }
        return build_config(policy=policy, **sections)

    return build


@pytest.fixture(scope="module")
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


def nothing(text: str) -> None:
    """Reports to nobody."""


def test_the_same_seed_makes_the_same_weights_and_words(
    small: Prepare, toolbox: ToolboxTask
) -> None:
    (one, words), (two, same) = (warm_start(small(), toolbox, nothing) for _ in range(2))
    assert words.get_vocab() == same.get_vocab()
    for name, weights in one.state_dict().items():
        assert torch.equal(weights, two.state_dict()[name]), name


def test_without_steps_the_policy_starts_from_random_weights(
    small: Prepare, toolbox: ToolboxTask
) -> None:
    config = small({"steps": 0})
    assert list(load_model(prepare_policy(config, toolbox, nothing)).parameters())


def test_another_seed_makes_other_weights(small: Prepare, toolbox: ToolboxTask) -> None:
    seeds = [small(run={"name": "unit", "seed": seed, "steps": 1}) for seed in (1, 2)]
    one, two = (warm_start(config, toolbox, nothing)[0] for config in seeds)
    assert not torch.equal(one.lm_head.weight, two.lm_head.weight)


def test_the_folder_holds_the_policy_that_was_made(small: Prepare, toolbox: ToolboxTask) -> None:
    made, words = warm_start(small(), toolbox, nothing)
    folder = prepare_policy(small(), toolbox)
    loaded, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = ChatFormat(words, toolbox.tools).first_prompt([{"role": "user", "content": "What is 4?"}])
    again = ChatFormat(tokenizer, toolbox.tools)
    assert again.first_prompt([{"role": "user", "content": "What is 4?"}]) == ids
    assert again.stop_ids[0] == words.eos_token_id
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits for model in (made.eval(), loaded)]
    torch.testing.assert_close(logits[0], logits[1])
    assert not loaded.training


def test_a_warm_start_is_made_once(small: Prepare, toolbox: ToolboxTask) -> None:
    reports: list[str] = []
    folders = [prepare_policy(small(), toolbox, reports.append) for _ in range(3)]
    assert folders == [policy_folder(small())] * 3
    *preparations, first, last = reports
    assert preparations == [
        "0 of 6 flawless demonstrations",
        "0 of 6 imperfect demonstrations",
        "training the tokenizer",
        "encoding the demonstrations",
    ]
    assert first.startswith("step 1 of 2, loss ")
    assert last.startswith("step 2 of 2, loss ")


def test_a_warm_start_that_was_broken_off_leaves_nothing_to_find(
    small: Prepare, toolbox: ToolboxTask
) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_policy(small(), toolbox, interrupt)
    assert list(small().policy.cache_dir.iterdir()) == []
    assert (prepare_policy(small(), toolbox) / "config.json").is_file()


def test_the_half_written_folder_of_a_killed_process_is_not_used(
    small: Prepare, toolbox: ToolboxTask
) -> None:
    config = small()
    left = config.policy.cache_dir / "tmp1234" / "policy"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    folder = prepare_policy(config, toolbox)
    assert folder != left
    assert load_model(folder).num_parameters() > 0


def test_a_folder_of_the_users_own_is_used_as_it_is(
    small: Prepare, toolbox: ToolboxTask, tmp_path: Path
) -> None:
    config = small(policy={"path": tmp_path / "mine"})
    assert prepare_policy(config, toolbox) == tmp_path / "mine"
    assert not config.policy.cache_dir.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"warm": {"steps": 3}},
        {"warm": {"error_rate": 0.4}},
        {"warm": {"lr": 1e-3}},
        {"policy": {"layers": 1}},
        {"policy": {"vocab_size": 330}},
        {"run": {"name": "unit", "seed": 4, "steps": 3}},
        {"environment": {"max_turns": 5}},
    ],
)
def test_what_the_warm_start_depends_on_changes_the_folder(
    small: Prepare, changed: dict[str, Any]
) -> None:
    assert policy_folder(small(**changed)) != policy_folder(small())


def test_what_it_does_not_depend_on_finds_the_same_folder(small: Prepare) -> None:
    config = small(
        run={"name": "other", "seed": 3, "steps": 99}, trainer={"lr": 1.0}, sdpo={"alpha": 1.0}
    )
    assert policy_folder(config) == policy_folder(small())


@pytest.mark.parametrize("named", ["{folder}/own_task.py:Own", "own_task:Own"])
def test_a_task_whose_file_was_edited_begins_a_new_warm_start(
    small: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "own_task.py"
    config = small(data={"task": named.format(folder=tmp_path)})
    found = []
    for text in ("class Own: pass", "class Own:\n    changed = True"):
        path.write_text(text)
        found.append(policy_folder(config))
    assert found[0] != found[1]


def settings(**changed: Any) -> WarmStartConfig:
    return WarmStartConfig(**{**SMALL, **changed})


def conversations(toolbox: ToolboxTask, count: int, **changed: Any) -> list[list[Piece]]:
    rng = random.Random(0)
    return [list(demonstrate(toolbox, n, settings(**changed), rng)) for n in range(count)]


def test_without_errors_a_demonstration_is_the_experts_own_episode(toolbox: ToolboxTask) -> None:
    for index, pieces in enumerate(conversations(toolbox, 20, error_rate=0.0, hinted_share=1.0)):
        session = SyncSession(toolbox, toolbox.episode("train", index))
        assert {kind for kind, _ in pieces} <= {"question", "action", "result"}
        for text in (text for kind, text in pieces if kind == "action"):
            assert text == toolbox.expert(session.messages)
            last = session.step(text)
        assert last.done
        assert session.outcome().success


def test_errors_are_as_frequent_as_asked(toolbox: ToolboxTask) -> None:
    shares = []
    for rate in (0.2, 0.6):
        first = [
            next(text for kind, text in pieces if kind == "action")
            for pieces in conversations(toolbox, 300, error_rate=rate, hinted_share=0.0)
        ]
        right = [
            toolbox.expert(SyncSession(toolbox, toolbox.episode("train", n)).messages)
            for n in range(300)
        ]
        shares.append(sum(a != b for a, b in zip(first, right, strict=True)) / 300)
    assert shares == pytest.approx([0.2, 0.6], abs=0.08)


def test_a_hint_is_followed_by_the_right_action(toolbox: ToolboxTask) -> None:
    hints = 0
    for index, pieces in enumerate(conversations(toolbox, 40, error_rate=1.0, hinted_share=1.0)):
        session = SyncSession(toolbox, toolbox.episode("train", index))
        for (before, _), (kind, text) in pairwise(pieces):
            if kind != "action":
                continue
            if before == "hint":
                assert text == toolbox.expert(session.messages)
                hints += 1
            session.step(text)
    assert hints > 20


def test_demonstrated_ids_are_the_ids_that_a_rollout_would_have(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    for index, pieces in enumerate(conversations(toolbox, 40, hinted_share=0.0)):
        session = SyncSession(toolbox, toolbox.episode("train", index))
        ids, learn = chat.first_prompt(session.messages), list[int]()
        for text in (text for kind, text in pieces if kind == "action"):
            action = chat.action(text)
            learn += range(len(ids), len(ids) + len(action))
            result = session.step(text)
            ids += action
            if not result.done:
                ids += chat.continuation(result.messages, chat.stop_ids[:1])
        found = encode(chat, pieces)
        assert found.ids == ids
        assert [place for place, own in enumerate(found.learn) if own] == learn


def test_a_hint_stands_before_the_generation_prompt_and_is_not_learnt(chat: ChatFormat) -> None:
    plain: list[Piece] = [("question", "What is 4?"), ("action", "Answer: 4")]
    hinted: list[Piece] = [plain[0], ("hint", "Hint: look."), plain[1]]
    prompt, hint = chat.generation_prompt, chat.hint("Hint: look.")
    without, found = encode(chat, plain), encode(chat, hinted)
    action = chat.action("Answer: 4")
    cut = len(without.ids) - len(action) - len(prompt)
    assert found.ids == without.ids[:cut] + hint + prompt + action
    assert found.learn == [False] * (cut + len(hint) + len(prompt)) + [True] * len(action)


def test_only_learnt_ids_have_labels() -> None:
    batch = [Demonstration([5, 6, 7], [False, True, True]), Demonstration([8], [True])]
    ids, labels = collate(batch, pad_id=0)
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert labels.tolist() == [[IGNORE, 6, 7], [8, IGNORE, IGNORE]]


def test_the_loss_is_a_mean_over_the_learnt_tokens_of_the_whole_batch(
    build_model: Any, rng: random.Random
) -> None:
    """Lengths for several forwards, one above their size; neither splits nor padding show."""
    model = build_model(1)
    batch = []
    for length in (1100, 700, 30, 400, 8, 300):
        ids = [rng.randrange(300) for _ in range(length)]
        batch.append(Demonstration(ids, [False, *(rng.random() < 0.3 for _ in ids[1:])]))
    loss = backward(model, batch, pad_id=0)
    found = [weights.grad.clone() for weights in model.parameters()]
    model.zero_grad()
    learnt, expected = sum(sum(item.learn) for item in batch), 0.0
    for item in batch:
        logits = model(input_ids=torch.tensor([item.ids])).logits[0]
        targets = torch.tensor(item.ids[1:])[torch.tensor(item.learn[1:])]
        rows = logits[:-1][torch.tensor(item.learn[1:])]
        one = torch.nn.functional.cross_entropy(rows, targets, reduction="sum") / learnt
        one.backward()
        expected += float(one.detach())
    assert loss == pytest.approx(expected, rel=1e-5)
    for one, weights in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, weights.grad, atol=1e-5, rtol=1e-3)


def test_imitation_lowers_the_loss_and_ends_in_evaluation_mode(
    build_model: Any, chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    data = [encode(chat, pieces) for pieces in conversations(toolbox, 8)]
    model, reports = build_model(1), list[str]()
    imitate(
        model,
        [data, data],
        settings(steps=15, batch_size=8, lr=3e-3),
        0,
        pad_id=0,
        report=reports.append,
    )
    losses = [float(one.rpartition(" ")[2]) for one in reports]
    assert losses[-1] < 0.8 * losses[0]
    assert not model.training
