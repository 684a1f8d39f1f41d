"""TRL's own tools and environments: failed calls are error sites, and are taught."""

from pathlib import Path
from typing import Any

import pytest
from trl_runs import last_log, qwen_call, qwen_policy, settings

from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.environments import (
    ENDED,
    TaskEnvironments,
    environment_rows,
)
from composer_mesh.plugins.frameworks.trl.traces import (
    Completion,
    error_sites,
    said_last,
    trace_of_completion,
)
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

pytestmark = [pytest.mark.filterwarnings("ignore")]  # of TRL and what it imports


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def divide(a: int, b: int) -> float:
    """Divide two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The quotient.
    """
    return a / b


def trained(tmp_path: Path, said: list[str | list[str]], **options: Any) -> Any:
    """A trainer after one step in which the model says this, turn by turn, in both rollouts."""
    from composer_mesh.plugins.frameworks.trl.trainer import ComposerGRPOTrainer

    tokenizer, model = qwen_policy()
    turns = iter(said)

    class Scripted(ComposerGRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            texts = next(turns)
            texts = [texts] * len(prompt_ids) if isinstance(texts, str) else texts
            return [tokenizer(one, add_special_tokens=False).input_ids for one in texts], None

    changes = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 2048,
    }
    trainer = Scripted(
        model=model,
        args=settings(tmp_path, **changes),
        processing_class=tokenizer,
        sdpo=SdpoConfig(alpha=0.5),
        **options,
    )
    trainer.train()
    return trainer


def test_a_tool_that_raises_is_taught_at_the_turn_of_its_call(tmp_path: Path) -> None:
    from datasets import Dataset

    turns: list[str | list[str]] = [
        qwen_call("divide", a=4, b=2),
        qwen_call("divide", a=4, b=0),
        "Nothing.<|im_end|>",
    ]
    row = {"prompt": [{"role": "user", "content": "Divide 4."}], "answer": "12345"}
    trainer = trained(
        tmp_path,
        turns,
        tools=[divide],
        reward_funcs=lambda completions, **_: [0.0, 1.0][: len(completions)],
        train_dataset=Dataset.from_list([row]),
    )
    log = last_log(trainer)
    assert (log["rollouts/error_sites"], log["sdpo/sites"]) == (2, 2)
    written = trainer._tokenizer(turns[1], add_special_tokens=False).input_ids
    assert log["sdpo/tokens"] == 2 * len(written), "the second turn, not the first"
    assert log["loss/sdpo"] > 0


def test_errors_of_a_task_are_taught_by_its_own_hints_and_its_answer_is_heard(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    from datasets import Dataset

    with_calls = next(
        row
        for row in environment_rows(toolbox, 20)
        if "calculator" in toolbox.expert([*row["prompt"]])
    )
    right = qwen_call("calculator", expression="1 +")
    trainer = trained(
        tmp_path,
        [right, ["That is 7.<|im_end|>", "I give up.<|im_end|>"]],
        environment_factory=TaskEnvironments(toolbox, "Toolbox"),
        train_dataset=Dataset.from_list([with_calls]),
    )
    log = last_log(trainer)
    assert log["rollouts/error_sites"] == 4, "a bad call and a wrong answer of each rollout"
    assert log["sdpo/sites"] == 4
    assert log["rewards/Toolbox/mean"] == 0


def test_sites_of_failed_calls_name_the_turn_the_tool_and_the_error() -> None:
    said = [
        {"role": "assistant", "content": "", "tool_calls": [{}, {}]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "sub", "content": str({"error": "Tool sub not found."})},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "tool", "name": "add", "content": str({"error": "b is missing"})},
    ]
    unknown, failed = error_sites(said, ["add"])
    assert (unknown.turn, unknown.error_kind) == (0, "unknown_tool")
    assert unknown.data == {"tool": "sub", "tools": "add"}
    assert (failed.turn, failed.data["text"]) == (1, "b is missing")
    assert said_last(said) is None
    assert said_last([*said, {"role": "assistant", "content": "Hm."}]) == "Hm."


def test_a_completion_becomes_turns_of_what_was_sampled() -> None:
    row = Completion([1, 2], [3, 4, 5, 6, 7], [True, True, False, True, True], [], [])
    trace = trace_of_completion(row, "t", 0, 0, [], 12)
    assert [(turn.context_ids, turn.action_ids) for turn in trace.turns] == [
        ([1, 2], [3, 4]),
        ([5], [6, 7]),
    ]
    assert trace.answer == "12"
    assert trace.token_ids() == [1, 2, 3, 4, 5, 6, 7]


def test_an_environment_begins_again_and_says_when_its_episode_has_ended(
    toolbox: ToolboxTask,
) -> None:
    factory = TaskEnvironments(toolbox, "Toolbox")
    environment = factory()
    assert type(environment).__name__ == "Toolbox"
    for _ in range(2):
        text = environment.reset(split="train", index=3)
        first = SyncSession(toolbox, toolbox.episode("train", 3)).messages
        assert text == "\n\n".join(one["content"] for one in first)
        assert environment.reset(split="train", index=3, prompt=[{"content": "q"}]) is None
        environment.calculator(expression="1 +")
        assert [site.turn for site in environment._sites] == [0]
        assert environment.get_reward() == 0
        assert environment.calculator(expression="1 + 1") == ENDED
