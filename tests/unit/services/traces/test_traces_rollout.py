"""One rollout on a page: everything that is known of it, and nothing that looks like the page."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from inspected_runs import a_pair, a_trace, listed_of
from rich.console import Console

from composer_mesh.configs.sdpo import HintsConfig
from composer_mesh.rollouts.hint_sources import Hint, WrittenHint
from composer_mesh.rollouts.hints import TEMPLATES, hint_templates
from composer_mesh.rollouts.pairs import FailureKind, Provenance, TeacherVote
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.store.rows import ItemState, LateReward
from composer_mesh.services.traces.listing import (
    ListedRollout,
    Paired,
    TokenCount,
    hints_of,
    stored_templates,
    tokenizer_folder,
)
from composer_mesh.services.traces.rollout_page import MOST_LINES, RolloutPage
from composer_mesh.services.traces.text import call_line, content_of, one_line, plain_lines

EVIL = "[bold]x[/]\x1b[2J\nturn 9 ─────\n\u202ey"


def page(rollout: ListedRollout, width: int = 80, full: bool = False) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(RolloutPage(rollout, full).draw())
    return [line.rstrip() for line in out.getvalue().split("\n")]


def rollout_of(trace: Trace, **known: Any) -> ListedRollout:
    return ListedRollout(listed_of(trace, step=4), trace, known.pop("group", [trace]), **known)


def answering(content: str) -> Trace:
    """A rollout whose policy and whose tool say the same."""
    said = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": content},
        {"role": "tool", "content": content},
    ]
    return a_trace(messages=said)


def test_a_page_has_all_that_is_known_of_a_rollout() -> None:
    trace = a_trace()
    other = a_trace("train-000000-001", sample=1, reward=1.0, success=True)
    late = LateReward(1, trace.trace_id, 0.75, "judge", ItemState.TRAINED, 4)
    rollout = rollout_of(
        trace,
        group=[trace, other],
        answer="12",
        hints=[Hint(0, "error", "Hint: count again", "llm")],
        pairs=[Paired(a_pair(trace), "trained", 5)],
        rewards=[late],
        teacher_queries={"outcomes": {"pair": 1, "tie": 2}},
        notes=["something is left out"],
    )
    text = "\n".join(page(rollout))
    for part in (
        "train-000000-000  ✗ reward 0",
        "toolbox train 0 · group 0, sample 0 · step 4",
        "1 turn · 2 tokens sampled of 5 · policy version 6–7",
        "answer  12",
        "0✗0.00  1✓1.00",
        "something is left out",
        "    user │ How much?",
        "turn 0  3 + 2 tokens · version 6–7 · log-prob -1.000 ─",
        "  policy │ Answer: 3",
        "   error │ wrong_answer  answer: 3",
        "    hint error, llm",
        "         │ Hint: count again",
        "teachers 2 of 3 votes, 3 queried · $0.0010 · trained in step 5",
        '         │ lookup(key="lamp")',
        'near  with the majority  lookup {"key":"lamp"}  $0.0010',
        "far  with the majority",
        "odd  against it, as the student  no idea",
        "late reward 0.75 from judge · trained in step 5",
        "teachers about this group's states: 1 pair, 2 tie",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_page_keeps_to_its_width(width: int) -> None:
    trace = answering("a word and another one " * 30)
    rollout = rollout_of(trace, pairs=[Paired(a_pair(trace), "waiting", None)])
    lines = page(rollout, width)
    assert max(map(len, lines)) <= width
    assert " ".join(lines).count("another") == 3 * 30  # nothing is cut off at the right


def test_what_others_wrote_stands_behind_a_bar_and_is_no_control_code() -> None:
    trace = answering(EVIL)
    pair = replace(
        a_pair(trace, chosen_text=EVIL),
        provenance=Provenance(2, (TeacherVote(EVIL, "words", EVIL),)),
    )
    lines = page(
        rollout_of(trace, pairs=[Paired(pair, "trained", 1)], hints=[Hint(0, "feedback", EVIL)])
    )
    assert all(line.isprintable() for line in lines if line)
    forged = [line for line in lines if "turn 9" in line]
    assert len(forged) >= 4
    assert all(line[9:11] == "│ " for line in forged)
    assert sum(line.startswith("turn ") for line in lines) == len(trace.turns)


def test_long_texts_are_shown_to_their_end_only_when_asked() -> None:
    trace = answering("\n".join(f"line {n}" for n in range(500)))
    short, full = (page(rollout_of(trace), full=full) for full in (False, True))
    assert len(short) < 4 * MOST_LINES < len(full)
    assert any("460 lines left out; --full shows them" in line for line in short)
    for shown in (short, full):
        assert any("line 0" in line for line in shown)
        assert any("line 499" in line for line in shown)
    assert not any("line 250" in line for line in short)


def test_arguments_of_many_lines_are_blocks() -> None:
    call = {"name": "bash", "arguments": '{"command": "one\\ntwo", "timeout": 3}'}
    said = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": call}]},
    ]
    lines = page(rollout_of(a_trace(messages=said)))
    start = next(n for n, line in enumerate(lines) if line.endswith("│ bash"))
    shown = [line.partition("│ ")[2].strip() for line in lines[start : start + 5]]
    assert shown == ["bash", "command:", "one", "two", "timeout: 3"]


def test_a_turn_that_was_cut_off_and_an_unlikely_one_say_so() -> None:
    turns = [Turn([1], [2, 3], [-4.0, -3.0], [1, 1], "length")]
    (rule,) = [line for line in page(rollout_of(a_trace(turns=turns)), 120) if "turn 0" in line]
    assert "log-prob -3.500 (unlikely) · cut off at its longest" in rule


def test_a_teacher_that_failed_says_how() -> None:
    trace = a_trace()
    voices = (
        TeacherVote("far", "failed", failure=FailureKind.TIMEOUT),
        TeacherVote("odd", "undecided"),
    )
    pair = a_pair(trace, provenance=Provenance(2, voices))
    text = "\n".join(page(rollout_of(trace, pairs=[Paired(pair, "waiting", None)])))
    assert "far  failed: timeout" in text
    assert "odd  undecided" in text


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": None}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "a\n[image_url]"),
        ({}, ""),
    ],
)
def test_the_content_of_any_chat_message_can_be_shown(message: dict[str, Any], text: str) -> None:
    assert content_of({"role": "user", **message}) == text


def test_one_line_is_one_line_of_a_bounded_length() -> None:
    assert one_line("a\n\n  b\tc", 20) == "a b c"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"
    assert one_line("\x00" * 50, 10).isprintable()
    assert plain_lines("a\n\tb") == ["a", "    b"]
    assert call_line("f", "no json") == "f(no json)"


class TestHints:
    """The hints on the page are those of the SDPO channel."""

    TRACE = a_trace()

    def test_the_writers_words_come_before_the_template(self) -> None:
        place = (self.TRACE.trace_id, 0)
        for written, expected in (
            ({}, ("Hint: 3 is wrong. Do every step, then copy the last result.", "template")),
            ({place: WrittenHint("Add again.", "llm")}, ("Hint: Add again.", "llm")),
        ):
            (hint,), notes = hints_of(
                self.TRACE,
                [self.TRACE],
                HintsConfig(),
                "12",
                written,
                TokenCount(256, no_folder),
                TEMPLATES,
            )
            assert (hint.text, hint.wording) == expected
            assert notes == []

    def test_a_hint_that_would_tell_the_answer_is_a_note(self) -> None:
        count = TokenCount(256, no_folder)
        hints, (note,) = hints_of(
            self.TRACE, [self.TRACE], HintsConfig(), "3", {}, count, TEMPLATES
        )
        assert hints == []
        assert "turn 0 has no hint: each one would have stated the answer" in note

    def test_a_long_hint_is_cut_with_the_policys_tokenizer(
        self, tokenizer: Any, tmp_path: Path
    ) -> None:
        folder = tmp_path / "checkpoints" / "step-12"
        tokenizer.save_pretrained(tmp_path / "checkpoints" / "step-9")
        tokenizer.save_pretrained(folder)
        assert tokenizer_folder(tmp_path, None) == folder
        count = TokenCount(8, lambda: tokenizer_folder(tmp_path, None))
        text = "What is the value of this and that?"
        assert count(text) == len(tokenizer.encode(text, add_special_tokens=False))
        config = HintsConfig(max_tokens=8)
        (hint,), _ = hints_of(self.TRACE, [self.TRACE], config, "12", {}, count, TEMPLATES)
        whole = "Hint: 3 is wrong. Do every step, then copy the last result."
        assert whole.startswith(hint.text)
        assert len(hint.text) < len(whole)
        assert not count.guessed

    def test_without_a_tokenizer_a_long_hint_is_shown_whole_and_said_to_be_guessed(self) -> None:
        count = TokenCount(8, no_folder)
        (hint,), _ = hints_of(
            self.TRACE, [self.TRACE], HintsConfig(max_tokens=8), "12", {}, count, TEMPLATES
        )
        assert hint.text.endswith("the last result.")
        assert count.guessed

    def test_the_runs_own_templates_decide(self, tmp_path: Path) -> None:
        site = replace(self.TRACE.error_sites[0], hint_template_key="doors_already")
        trace = replace(self.TRACE, error_sites=[site])
        given = (trace, [trace], HintsConfig(), "12", {}, TokenCount(256, no_folder))
        own = hint_templates({"doors_already": "The doors are shut already."})
        (hint,), notes = hints_of(*given, own)
        assert (hint.text, notes) == ("Hint: The doors are shut already.", [])
        hints, (note,) = hints_of(*given, TEMPLATES)
        assert (hints, "no hint template 'doors_already'" in note) == ([], True)
        hints, (note,) = hints_of(*given, None)
        assert hints == []
        assert note.endswith(
            "the task's templates are unknown, since hint_templates.json cannot be read"
        )

    @pytest.mark.parametrize(
        "content",
        ["", "[]", '{"a": 1}', '{"a": "{x.__class__}"}', '{"a": "{"}', "\xff", "[" * 9999],
    )
    def test_a_file_of_templates_that_is_none_is_read_as_none(
        self, content: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "hint_templates.json"
        assert stored_templates(tmp_path) is None
        file.write_bytes(content.encode("latin-1"))
        assert stored_templates(tmp_path) is None
        file.write_text('{"a": "Do {x}."}')
        assert stored_templates(tmp_path) == {"a": "Do {x}."}


def no_folder() -> None:
    return None
