"""A run whose rollouts, events and pairs hold what a page must show as text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from inspected_runs import a_pair, a_trace

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import Provenance, TeacherVote
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.replay.pair_stream import (
    TeacherQueryRecord,
    query_record_to_json,
)
from composer_mesh.services.steps.step_manifest import ReplayOutcome
from composer_mesh.services.store.writing import RunStore

LONG_LINE = 5_000_000
HOSTILE = {
    "script": "<script>alert('dialog')</script>",
    "image": "<img src=http://evil.example/pixel onerror=alert(1)>",
    "svg": "<svg/onload=alert(1)><a xlink:href=javascript:alert(1)>x</a></svg>",
    "attribute": '"\'><script src=//evil.example/x.js></script><b title="',
    "end": "</pre></section></main></body><h1>own</h1><meta http-equiv=refresh content=0>",
    "direction": "safe\u202egnp.exe\u2066\u2067\u200f",
    "terminal": "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "template": "{{ 7 * 191 }}{% include 'base.html' %}${7*191}<%= 7*191 %>",
    "link": "javascript:alert(1)//http://evil.example",
    "entity": "&lt;script&gt;&#x3c;script&#x3e;",
    "style": "<style>@import 'http://evil.example'</style><link rel=stylesheet href=//evil>",
    "lines": "data: main\ndata: <b>injected</b>\n\nevent: x\n\n",
    "surrogate": "\U0001f600\ufffe\u2028\u2029\x00",
}


def hostile_trace(sample: int, text: str) -> Trace:
    """A rollout in which every text of models, tools and tasks is the same hostile one."""
    call = {"type": "function", "function": {"name": text[:200], "arguments": {text[:200]: text}}}
    messages: list[Message] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": text[:200], "content": text},
    ]
    turn = Turn([1, 2, 3], [4, 5], [-0.5, -1.5], [6, 7], "stop")
    site = ErrorSite(0, text[:200], text[:200], {text[:200]: text})
    return replace(
        a_trace(f"train-000000-{sample:03d}"),
        sample=sample,
        task=text[:200],
        messages=messages,
        turns=[turn],
        error_sites=[site],
        answer=text,
        rewards={text[:200]: 0.5},
    )


def hostile_group(long_line: int = LONG_LINE) -> list[Trace]:
    texts = [*HOSTILE.values(), "A" * long_line]
    return [hostile_trace(sample, text) for sample, text in enumerate(texts)]


async def write_hostile_run(root: Path, config: Config, long_line: int = LONG_LINE) -> None:
    """Write the run, with one step, a pair about each rollout, and events."""
    group = hostile_group(long_line)
    pairs = []
    for trace, text in zip(group, HOSTILE.values(), strict=False):
        voice = TeacherVote(text, "call", text, with_majority=True, model=text)
        provenance = Provenance(1, (voice,))
        changes = {"chosen_text": text, "rejected_text": text, "teachers": [text]}
        pairs.append(a_pair(trace, **changes, provenance=provenance))
    with RunStore(root, config) as store:
        for text in HOSTILE.values():
            store.add_event("actor_died", text, text, {text: text, "cause": text})
        store.enter(0, 0)
        await store.add_group(0, group)
        record = TeacherQueryRecord(0, [], ReplayOutcome(states=len(pairs)), pairs)
        await store.add_teacher_queries(0, query_record_to_json(record, pairs), pairs)
        await store.plan_step(0, [0], b"{}", [pair.pair_id for pair in pairs])
        figures = {"step": 1, "reward/mean": 0.5, "replay/states": 2, "replay/outcome/pair": 1}
        named = {f"replay/dropped/{text}": 1 for text in HOSTILE.values()}
        await store.end_step(0, {**figures, **named, "time/step_s": 1.0, "tokens/trained": 10})


def write(root: Path, config: Config, long_line: int = LONG_LINE) -> None:
    asyncio.run(write_hostile_run(root, config, long_line))
