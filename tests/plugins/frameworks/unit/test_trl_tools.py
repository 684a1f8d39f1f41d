"""TRL's rollouts as traces, error sites, and the parts of a step that its microbatches train."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_world import World, trace_of
from hinted import view
from hypothesis import given
from hypothesis import strategies as some
from offline_runs import COST, ENVIRON, knowing, paid, traces_of
from trl_runs import last_log, pair_rows, qwen_call, qwen_policy, settings

from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.environments import (
    ENDED,
    TaskEnvironments,
    environment_rows,
)
from composer_mesh.plugins.frameworks.trl.pairs import (
    NoPairs,
    PairSettings,
    StoredPairs,
    TeacherPairs,
    grouped,
)
from composer_mesh.plugins.frameworks.trl.parts import BatchLayout, dealt, parts_of
from composer_mesh.plugins.frameworks.trl.rollouts import TaskRollouts, episode_reward, episode_rows
from composer_mesh.plugins.frameworks.trl.traces import (
    Completion,
    error_sites,
    said_last,
    trace_of_completion,
)
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.budget import dollars
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.reward import group_reward
from composer_mesh.tasks.task import Task
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


@pytest.mark.parametrize("max_context", [512, 170])
async def test_traces_are_those_of_a_run(
    tokenizer: Any, toolbox: ToolboxTask, build_config: Any, max_context: int
) -> None:
    config = build_config(
        generator={"max_new_tokens": 60}, policy={"max_context": max_context, "vocab_size": 400}
    )
    chat = ChatFormat(tokenizer, toolbox.tools)
    world = World(toolbox, chat, seed=1, error_rate=0.5)
    sampling = Sampling.training(config)
    episodes = [toolbox.episode("train", index) for index in range(12)]
    traces = [
        await trace_of(world, Sample(episode, place, 0, sampling))
        for place, episode in enumerate(episodes)
    ]
    answers = {
        tuple(trace.prompt_ids(turn)): trace.turns[turn].action_ids
        for trace in traces
        for turn in range(len(trace.turns))
    }

    def sample_again(contexts: list[list[int]]) -> tuple[list[list[int]], None]:
        return [answers[tuple(context)] for context in contexts], None

    rollouts = TaskRollouts(toolbox, tokenizer, chat=chat)
    played = rollouts.play(episodes, sample_again, max_context)
    for trace, own in zip(traces, played, strict=True):
        assert own.token_ids() == trace.token_ids()
        assert own.action_mask() == trace.action_mask()
        assert replace(own, turns=[], trace_id="", sample=0) == replace(
            trace, turns=[], trace_id="", sample=0
        )
    assert {trace.success for trace in played} == {True, False}


def test_equal_prompts_are_a_group_and_ids_are_never_used_again(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    rollouts = TaskRollouts(toolbox, tokenizer, max_context=512)
    said = rollouts.chat.action("no idea")

    class Trainer:
        def _generate_single_turn(self, contexts: Any, *_: Any) -> Any:
            return [said for _ in contexts], [[-0.5] * len(said) for _ in contexts]

    prompts = [row["prompt"] for row in episode_rows(2) for _ in range(3)]
    first, second = (rollouts(prompts, Trainer()) for _ in range(2))
    traces = [*(first["trace"] or ()), *(second["trace"] or ())]
    assert [trace.group_id for trace in traces] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert len({trace.trace_id for trace in traces}) == 12
    assert first["completion_ids"] == [said] * 6
    assert first["logprobs"] == [[-0.5] * len(said)] * 6
    assert first["env_mask"] == [[1] * len(said)] * 6
    seen: dict[str, float] = {}
    given = {name: first[name] for name in ("reward", "trace")}
    assert episode_reward(**given, log_metric=seen.__setitem__) == first["reward"]
    assert seen == {"rollouts/success": 0.0}


def test_prompts_and_tasks_that_cannot_be_played_are_refused(
    tokenizer: Any, toolbox: ToolboxTask
) -> None:
    with pytest.raises(ValueError, match="make the rows of the data set with episode_rows"):
        TaskRollouts(toolbox, tokenizer)(["What is 1 + 1?"], None)

    rollouts = TaskRollouts(toolbox, tokenizer)
    with pytest.raises(ValueError, match=r"train/0 begins with \d+ tokens, but max_context is 9"):
        rollouts.play([toolbox.episode("train", 0)], lambda contexts: (contexts, None), 9)

    class Grouped(Task):
        @group_reward
        def best(self, transcripts: list[Any]) -> list[float]:
            return [0.0 for _ in transcripts]

    with pytest.raises(ValueError, match="group reward 'best'"):
        TaskRollouts(Grouped(), tokenizer)


counts = some.integers(1, 6)


def pairs(count: int) -> list[PairSample]:
    return [PairSample(f"p{place}", [1], [2], [3]) for place in range(count)]


@given(counts, counts, counts, some.integers(0, 30))
def test_every_pair_is_dealt_once_and_evenly(
    microbatches: int, accumulated: int, ranks: int, count: int
) -> None:
    layout = BatchLayout(microbatches, accumulated, ranks)
    found = dealt(pairs(count), layout)
    ids = [pair.pair_id for at in found for own in at for pair in own]
    assert sorted(ids) == sorted(one.pair_id for one in pairs(count))
    by_step = [0] * layout.steps
    for at, own in enumerate(found):
        by_step[layout.step_of(at)] += sum(map(len, own))
    assert max(by_step) - min(by_step) <= 1


@given(counts, counts, counts, some.integers(0, 9), some.data())
def test_losses_of_all_microbatches_and_ranks_add_up_to_the_mean_of_a_step(
    steps: int, accumulated: int, ranks: int, count: int, data: some.DataObject
) -> None:
    layout = BatchLayout(steps * accumulated, accumulated, ranks)
    numbers = some.lists(
        some.lists(some.integers(0, 3), min_size=layout.microbatches, max_size=layout.microbatches),
        min_size=ranks,
        max_size=ranks,
    )
    lengths = data.draw(numbers)
    rows = [[[[view("t", response=n)] if n else []] for n in own] for own in lengths]
    tokens = [list(column) for column in zip(*lengths, strict=True)]
    shared, weights = pairs(count), [0.0] * steps
    pair_weights = [0.0] * steps
    for rank in range(ranks):
        for at, part in enumerate(parts_of(rows[rank], tokens, shared, layout, rank)):
            step = layout.step_of(at)
            weights[step] += tokens[at][rank] / part.sdpo_tokens if tokens[at][rank] else 0
            pair_weights[step] += len(part.pairs) / part.pair_count if part.pairs else 0
            assert part.any_rank_has_views == any(tokens[at])
    assert all(one in (0, pytest.approx(1)) for one in weights)
    assert all(one in (0, pytest.approx(1)) for one in pair_weights)


def test_a_part_of_a_step_has_the_divisor_of_a_whole_one() -> None:
    layout = BatchLayout(microbatches=2, accumulated=8)
    parts = parts_of([[[view("t", response=3)]], [[]]], [[3], [0]], pairs(2), layout)
    assert [part.sdpo_tokens for part in parts] == [12, 12]
    assert [part.pair_count for part in parts] == [8, 8]
    assert layout.share(32) == 8


def pair_settings(tokenizer: Any, task: ToolboxTask, folder: Path) -> PairSettings:
    return PairSettings(ChatFormat(tokenizer, task.tools), 512, 4, 7, folder)


def test_stored_pairs_come_in_an_order_of_the_step_and_every_epoch_has_all(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    rows, file = pair_rows(toolbox, 7), tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [StoredPairs(file, per_step=3), StoredPairs(rows, per_step=3)]
    for source in sources:
        source.open(pair_settings(tokenizer, toolbox, tmp_path))
    first, again = ([s.pairs(step, 1.0, ())[0] for step in range(7)] for s in sources)
    assert first == again
    ids = [pair.pair_id for step in first for pair in step]
    assert sorted(ids[:7]) == sorted(ids[7:14]) == sorted(row["state_id"] for row in rows)
    assert ids[:7] != ids[7:14]
    chat = ChatFormat(tokenizer, toolbox.tools)
    (pair,) = (one for one in first[0] if one.pair_id == ids[0])
    row = next(row for row in rows if row["state_id"] == ids[0])
    assert chat.action_text(pair.chosen_ids) == row["chosen"][0]["content"]
    assert pair.context_ids == chat.first_prompt(row["prompt"])


def test_rows_that_are_no_pairs_are_refused(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    where = pair_settings(tokenizer, toolbox, tmp_path)
    with pytest.raises(NoPairs, match="row 0 has no rejected"):
        StoredPairs([{"prompt": [{}], "chosen": [{}]}]).open(where)
    with pytest.raises(NoPairs, match="none of 0 pairs"):
        StoredPairs([]).open(where)
    file = tmp_path / "pairs.jsonl"
    for line, said in ((b"{", "is not valid JSON"), ('{"é": 1}'.encode("latin-1"), "is not UTF-8")):
        file.write_bytes(b"{}\n" + line + b"\n")
        with pytest.raises(UnusableTask, match=rf"pairs\.jsonl: line 2 {said}"):
            StoredPairs(file).open(where)
    with pytest.raises(ValueError, match="per_step is 0"):
        StoredPairs([], per_step=0)


def test_teachers_make_pairs_of_rollouts_and_stop_at_the_ceiling(
    tmp_path: Path, tokenizer: Any, toolbox: ToolboxTask
) -> None:
    provider, ceiling = knowing(toolbox), 0.012
    source = TeacherPairs(
        paid("a", "b", "c"),
        ceiling,
        overrides=["replay.states_per_step=8"],
        environ=ENVIRON,
        transport=provider.transport,
    )
    where = replace(pair_settings(tokenizer, toolbox, tmp_path), max_context=100_000)
    source.open(where)
    traces, usd, ids = traces_of(toolbox, 24), 0.0, list[str]()
    for step in range(6):
        found, figures = source.pairs(step, 1.0, traces[step * 12 : step * 12 + 12])
        usd, ids = usd + figures["replay/usd"], ids + [pair.pair_id for pair in found]
    source.close()
    assert len(ids) == len(set(ids)) > 0
    assert 0 < usd <= ceiling < 24 * 2 * 3 * COST
    assert usd == pytest.approx(dollars(provider.charged))
    source.close()


def test_a_group_that_was_played_on_two_ranks_is_one_again(toolbox: ToolboxTask) -> None:
    traces = traces_of(toolbox, 3, size=2)
    mixed = [traces[at] for at in (0, 2, 4, 1, 3, 5)]
    found = grouped(mixed, 10)
    assert [[one.index for one in group] for group in found] == [[0, 0], [1, 1], [2, 2]]
    assert [group[0].group_id for group in found] == [10, 11, 12]
    assert len({one.trace_id for group in found for one in group}) == 6
