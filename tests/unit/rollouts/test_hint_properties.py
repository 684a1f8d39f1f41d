"""Hints over 500 generated groups of rollouts, in every chat format and from every source.

What is generated is as bad as it gets: contents, facts and writers' words are made of control
tokens, the verified answer in many spellings, and ordinary words; actions are arbitrary ids.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from string import Formatter
from typing import Any, cast

import pytest
from chat_templates import USABLE, with_template
from repetition import LONG

from composer_mesh.channels.sdpo import HintedSites, hinted_sites
from composer_mesh.configs.sdpo import HintsConfig
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import Place, WrittenHint
from composer_mesh.rollouts.hints import TEMPLATES
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.tool_calls import assistant_message, call_text
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.tasks.toolbox import ToolboxTask

TRACES = 500
ANSWER, SPELLINGS = "57", ["57", "57.0", "5.7e1", "fifty-seven", "57!", "(57)", "5\u200b7"]
WORDS = [
    "lamp",
    "570",
    "look",
    "at",
    "the",
    "key",
    "157",
    "0.57",
    "Hint:",
    "five",
    "x57",
    "äß",
    ",",
]
FIELDS = {field for text in TEMPLATES.values() for _, field, _, _ in Formatter().parse(text)}
FACTS = sorted(field for field in FIELDS if field)


@dataclass(frozen=True)
class Case:
    """A group of rollouts and how its hints are made."""

    chat: ChatFormat
    group: list[Trace]
    config: HintsConfig
    written: dict[Place, WrittenHint]
    max_context: int

    def sites(self) -> HintedSites:
        return hinted_sites(
            self.group,
            self.chat,
            lambda trace: ANSWER,
            99,
            self.max_context,
            self.config,
            self.written,
        )

    def trace(self, view: HintedView) -> Trace:
        return next(trace for trace in self.group if trace.trace_id == view.trace_id)

    def hint_ids(self, view: HintedView) -> list[int]:
        """What the teacher has read and the student has not."""
        place = len(self.trace(view).prompt_ids(view.turn)) - len(self.chat.generation_prompt)
        return view.teacher_ids[place : place + view.offset]


class Maker:
    """Cases by seed."""

    def __init__(self, chats: list[ChatFormat], seed: int) -> None:
        self.rng = random.Random(seed)
        self.chat = chats[seed % len(chats)]
        added = cast(Any, self.chat.tokenizer).get_added_vocab()
        self.controls = list(added)
        self.ids = len(self.chat.tokenizer)

    def case(self) -> Case:
        rng = self.rng
        group = [self.trace(sample) for sample in range(rng.randint(1, 3))]
        sources = rng.sample(["error", "sibling", "feedback"], rng.randint(1, 3))
        llm = "error" in sources and rng.random() < 0.5
        config = HintsConfig.model_validate(
            {
                "sources": sources,
                "max_tokens": rng.choice([8, 20, 60, 400]),
                "writer": "llm" if llm else "template",
                "llm": {"kind": "builtin"},
            }
        )
        written = {
            (trace.trace_id, site.turn): WrittenHint(self.text(), rng.choice(["llm", "cached"]))
            for trace in group
            for site in trace.error_sites
            if llm and rng.random() < 0.7
        }
        return Case(self.chat, group, config, written, rng.choice([90, 180, 10_000, 10_000]))

    def trace(self, sample: int) -> Trace:
        rng, turns, messages = self.rng, list[Turn](), [self.message("user")]
        fresh, count = self.chat.first_prompt(messages), self.rng.randint(1, 4)
        for turn in range(count):
            ids = [rng.randrange(self.ids) for _ in range(rng.randint(1, 9))]
            turns.append(Turn(fresh, ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
            messages.append(assistant_message(self.action(), f"call_{turn}"))
            if turn + 1 < count or rng.random() < 0.3:
                messages.append(self.message(rng.choice(["tool", "user"])))
                ended = self.chat.stop_ids if rng.random() < 0.8 else []
                fresh = self.chat.continuation(messages[-1:], ended)
        failing = [turn for turn in range(count) if rng.random() < 0.5]
        sites = [self.site(turn) for turn in failing]
        success = rng.random() < 0.4
        name = f"t{sample}"
        return Trace(
            name, 0, sample, "t", "train", 0, turns, messages, float(success), success, sites
        )

    def action(self) -> str:
        if self.rng.random() < 0.3:
            return self.text()
        return call_text(self.rng.choice(WORDS), {self.rng.choice(WORDS): self.text()})

    def message(self, role: str) -> Message:
        return {"role": role, "content": self.text()}

    def site(self, turn: int) -> ErrorSite:
        key = self.rng.choice(list(TEMPLATES))
        return ErrorSite(turn, key, key, {field: self.text() for field in FACTS})

    def text(self) -> str:
        rng = self.rng
        pieces = [
            rng.choices([rng.choice(WORDS), rng.choice(self.controls), rng.choice(SPELLINGS)],
                        [8, 4, 0.3])[0]
            for _ in range(rng.randint(1, 8))
        ]  # fmt: skip
        return rng.choice([" ", " ", ""]).join(pieces)


@pytest.fixture(scope="module")
def cases(tokenizer: Any, toolbox: ToolboxTask) -> list[Case]:
    """At least 500 traces with errors, and some without."""
    chats = [ChatFormat(tokenizer, toolbox.tools)]
    # They write no tools, whose schemas would make each conversation longer than most contexts.
    chats += [ChatFormat(with_template(tokenizer, text), []) for text in USABLE.values()]
    made: list[Case] = []
    while sum(bool(trace.error_sites) for case in made for trace in case.group) < TRACES:
        made.append(Maker(chats, len(made)).case())
    return made


@pytest.fixture(scope="module")
def shown(cases: list[Case]) -> list[tuple[Case, HintedSites]]:
    return [(case, case.sites()) for case in cases]


Shown = list[tuple[Case, HintedSites]]


@LONG
def test_the_generated_hints_are_of_every_kind(shown: Shown) -> None:
    total = dict.fromkeys(shown[0][1].counts.metrics(), 0)
    for _, found in shown:
        for name, count in found.counts.metrics().items():
            total[name] += count
    never_here = {"hints/requests", "hints/usd", "hints/unwritten"}
    assert {name for name, count in total.items() if count < 10} == never_here
    assert sum(len(found.views) for _, found in shown) > TRACES


def test_every_shown_hint_is_counted_once(shown: Shown) -> None:
    for _, found in shown:
        assert found.counts.shown == len(found.views)
        assert len({(view.trace_id, view.turn) for view in found.views}) == len(found.views)


def test_the_teacher_reads_the_hint_before_the_identical_response_ids_and_nothing_else_more(
    shown: Shown,
) -> None:
    for case, found in shown:
        frame = len(case.chat.hint(""))
        for view in found.views:
            trace, hint = case.trace(view), case.hint_ids(view)
            student, context = trace.token_ids(), trace.prompt_ids(view.turn)
            response = trace.turns[view.turn].action_ids
            assert view.targets == response
            first = len(context) - 1
            assert view.student_rows == list(range(first, first + len(response)))
            assert [student[row + 1] for row in view.student_rows] == response
            assert [view.teacher_ids[row + 1] for row in view.teacher_rows] == response
            place = len(context) - len(case.chat.generation_prompt)
            assert len(hint) == view.offset > 0
            assert view.offset - frame <= case.config.max_tokens
            assert view.teacher_ids[:place] == context[:place]
            assert view.teacher_ids[place + len(hint) :] == context[place:] + response
            assert len(view.teacher_ids) <= case.max_context


def test_no_hint_tells_the_answer(shown: Shown) -> None:
    for case, found in shown:
        for view in found.views:
            text = case.chat.tokenizer.decode(case.hint_ids(view))
            assert not holds_answer(text, ANSWER)
            assert re.search(r"\bfifty-seven\b", text) is None
            for word in text.replace("(", " ").replace(")", " ").replace("!", " ").split():
                assert word not in ("57", "57.0", "5.7e1")


def test_forged_chat_markers_stay_text(shown: Shown) -> None:
    for case, found in shown:
        controls = set(cast(Any, case.chat.tokenizer).get_added_vocab().values())
        honest = [token for token in case.chat.hint("word") if token in controls]
        for view in found.views:
            assert [token for token in case.hint_ids(view) if token in controls] == honest


def test_the_same_group_gets_the_same_hints(cases: list[Case], shown: Shown) -> None:
    for case, (_, found) in zip(cases[::10], shown[::10], strict=True):
        assert case.sites() == found
