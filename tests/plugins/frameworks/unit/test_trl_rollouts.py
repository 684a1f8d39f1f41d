"""Episodes inside of TRL are those of a run: the same ids, errors, rewards and ends."""

from dataclasses import replace
from typing import Any

import pytest
from controller_world import World, trace_of

from composer_mesh.plugins.frameworks.trl.rollouts import TaskRollouts, episode_rows, reward
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.tasks.reward import group_reward
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.toolbox import ToolboxTask


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
    assert reward(**given, log_metric=seen.__setitem__) == first["reward"]
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
