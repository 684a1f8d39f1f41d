"""The comparison with TRL: its episodes are the run's own, and its clock leaves out both ends."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from controller_world import World, trace_of

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.tasks.toolbox import ToolboxTask

episodes_of: Any = importlib.import_module("vs_trl_episodes")
runs: Any = importlib.import_module("vs_trl_run")


@pytest.mark.parametrize("max_context", [512, 170])
async def test_episodes_played_at_once_are_those_of_a_run(
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

    def sample_again(contexts: list[list[int]]) -> list[list[int]]:
        return [answers[tuple(context)] for context in contexts]

    played = episodes_of.Player(config, toolbox, chat).play(episodes, sample_again)
    for trace, one in zip(traces, played, strict=True):
        first = len(one.prompt_ids)
        whole, length = one.context, len(trace.token_ids())
        assert whole[:length] == trace.token_ids()
        assert [bool(m) for m in one.mask][: length - first] == trace.action_mask()[first:]
        assert not any(one.mask[length - first :])  # a last result that nobody has answered
        assert (one.reward, one.success) == (trace.reward, trace.success)
    assert len({trace.success for trace in traces}) == 2
    assert max(len(trace.turns) for trace in traces) > 1


def test_tokens_a_second_leave_out_the_steps_at_both_ends() -> None:
    steps = [runs.Step(n, 100 * n, 10.0 + 2 * n, 0.1 * n) for n in range(1, 8)]
    run = runs.Recorded(launched=0.0, began=3.0, ended=40.0, steps=steps)
    assert run.tokens_per_s(2, 5) == pytest.approx((300 + 400 + 500) / 6)
    assert run.tokens_per_s(0, 2) == pytest.approx(300 / (14.0 - 3.0))
    assert run.trained_s(3) == 13.0
    assert run.wall_s == 40.0
    assert (run.sampled(0.45), run.sampled(0.55), run.sampled(0.65)) == (6, 7, None)
