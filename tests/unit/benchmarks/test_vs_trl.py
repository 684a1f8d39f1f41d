"""The comparison with TRL: its episodes are played as in TRL, its clock leaves out both ends."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.toolbox import ToolboxTask

episodes_of: Any = importlib.import_module("vs_trl_episodes")
runs: Any = importlib.import_module("vs_trl_run")


def test_an_episode_is_its_prompt_and_what_was_sampled_after_it(
    tokenizer: Any, toolbox: ToolboxTask, build_config: Any
) -> None:
    chat, episode = ChatFormat(tokenizer, toolbox.tools), toolbox.episode("train", 0)
    said = chat.action("no idea")
    player = episodes_of.Player(build_config(), toolbox, chat)
    (played,) = player.play([episode], lambda contexts: [said for _ in contexts])
    assert (played.ids, played.mask) == (said, [1] * len(said))
    assert chat.tokenizer.decode(played.prompt_ids)
    assert not played.success


def test_tokens_a_second_leave_out_the_steps_at_both_ends() -> None:
    steps = [runs.Step(n, 100 * n, 10.0 + 2 * n, 0.1 * n) for n in range(1, 8)]
    run = runs.Recorded(launched=0.0, began=3.0, ended=40.0, steps=steps)
    assert run.tokens_per_s(2, 5) == pytest.approx((300 + 400 + 500) / 6)
    assert run.tokens_per_s(0, 2) == pytest.approx(300 / (14.0 - 3.0))
    assert run.trained_s(3) == 13.0
    assert run.wall_s == 40.0
    assert (run.sampled(0.45), run.sampled(0.55), run.sampled(0.65)) == (6, 7, None)
