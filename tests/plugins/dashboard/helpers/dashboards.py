"""A dashboard in this process, asked without a socket; and its pages read as a browser would.

Also a run whose rollouts, events and pairs hold what a page must show as text.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
from inspected_runs import a_pair, a_trace

from composer_mesh.configs.schema import Config
from composer_mesh.plugins.dashboard.access import Sessions
from composer_mesh.plugins.dashboard.app import Dashboard, DashboardOptions, make_app
from composer_mesh.rollouts.pairs import Provenance, TeacherVote
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.replay.teacher_queries import TeacherQueryRecord, query_record_to_json
from composer_mesh.services.steps.step_manifest import ReplayOutcome
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.web.http_server import Access

BASE = "http://127.0.0.1:8200"
OWN_TAGS = {
    *("html", "head", "meta", "title", "link", "script", "style", "noscript", "body", "header"),
    *("nav", "main", "section", "article", "div", "span", "a", "p", "br", "wbr", "b", "small"),
    *("h1", "h2", "h3", "dl", "dt", "dd", "ul", "ol", "li", "pre", "code", "kbd", "time", "dialog"),
    *("form", "label", "input", "select", "option", "fieldset", "legend", "button", "progress"),
    *("table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "g", "line"),
    *("text", "path", "rect", "circle", "polyline", "polygon"),
}


def dashboard(
    folder: Path, token: str = "", user: int | None = None, **options: Any
) -> tuple[Dashboard, Any]:
    """The dashboard of a folder and its application, with the checks of a served one."""
    chosen = DashboardOptions(folder=folder, **options)
    made = Dashboard.of(chosen, Sessions(token))
    made.catalog.read_all()
    who = os.geteuid() if user is None else user
    return made, Access(make_app(made, lambda _: who), chosen.names, "")


def client(app: Any, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers)


class Page(HTMLParser):
    """The elements, the attributes and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(html)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def check_harmless(self) -> None:
        """Fail for an element, a handler, a style or an address that is not the page's own."""
        for tag, attributes in self.elements:
            assert tag in OWN_TAGS, tag
            for key, value in attributes.items():
                assert not key.startswith("on"), (tag, key)
                assert key != "style", tag
                if key in ("href", "src", "action", "xlink:href"):
                    assert value.startswith(("/", "?", "#")), (tag, key, value)
                    assert not value.startswith("//"), (tag, key, value)
        scripts = [about for tag, about in self.elements if tag == "script"]
        assert scripts == [{"src": "/static/app.js", "defer": ""}]
        metas = [about.get("http-equiv") for tag, about in self.elements if tag == "meta"]
        assert not set(metas) - {None}


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


def write_hostile(root: Path, config: Config, long_line: int = LONG_LINE) -> None:
    asyncio.run(write_hostile_run(root, config, long_line))
