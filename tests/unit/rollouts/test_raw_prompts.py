"""Raw prompts, which agents render themselves, and stop strings: ids stay as they were sampled."""

from __future__ import annotations

from typing import Any

import pytest
from agent_templates import FAMILIES
from chat_templates import with_template

from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.captured_episode import CapturedEpisode, CaptureFormat, cut_at_stop
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationResult


@pytest.fixture(scope="module")
def qwen(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


def an_episode(chat: ChatFormat) -> CapturedEpisode:
    return CapturedEpisode(CaptureFormat.of(chat, 500))


@pytest.mark.parametrize("stop", ["Observation:", "tion", "n: it", "5"])
def test_a_stop_string_keeps_the_ids_that_sampling_would_have_stopped_at(
    qwen: ChatFormat, stop: str
) -> None:
    text = "add 2 and 3 = 5\nObservation: it is 5 again\nObservation: 5"
    ids = qwen.action(text)
    cut = cut_at_stop(qwen, ids, ["never", stop])
    assert cut.text == text[: text.index(stop)]
    assert stop in qwen.action_text(cut.ids)
    assert stop not in qwen.action_text(cut.ids[:-1])
    assert ids[: len(cut.ids)] == cut.ids


def test_raw_text_continues_the_same_ids(qwen: ChatFormat) -> None:
    episode, said = an_episode(qwen), qwen.action("cal culator")
    prompt = episode.text_prompt("calcu")
    result = GenerationResult("t-0", said, [-0.5] * len(said), [0] * len(said), "stop")
    turn = episode.record_text(prompt, "calcu", result)
    turn.deliver()
    for rest in ("\nlator", "<|im_end|>\nlator"):
        again = episode.text_prompt(f"calcucal culator{rest}")
        assert again.parent is turn
        after = qwen.tokenizer.encode("\nlator", add_special_tokens=False)
        assert again.ids == [*prompt.ids, *said, *after]
    assert episode.text_prompt([*prompt.ids, *said, 7]).context_ids == [7]
    assert episode.text_prompt("other").parent is None


def test_a_raw_answer_without_text_is_not_what_its_own_prompt_continues(qwen: ChatFormat) -> None:
    episode = an_episode(qwen)
    prompt = episode.text_prompt("calcu")
    result = GenerationResult("t-0", [qwen.stop_ids[0]], [-0.5], [0], "stop")
    episode.record_text(prompt, "calcu", result)
    assert episode.text_prompt("calcu").ids == prompt.ids


@pytest.mark.parametrize("given", ["", [], [500], [-1]])
def test_a_raw_prompt_without_usable_ids_is_refused(qwen: ChatFormat, given: Any) -> None:
    with pytest.raises(UnusableMessages):
        an_episode(qwen).text_prompt(given)
