"""The panel: what is paid, what is kept, what a ceiling refuses, what a closed panel leaves.

The cache of answers: what is kept once stays, for every process, or the file is named.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repetition import repeated
from scripted_provider import ENVIRON, KEY, ScriptedProvider, answer, state, teacher

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.panel.panel import ResponseCache, TeacherPanel, content_key
from composer_mesh.actors.provider.client import ClientClosed
from composer_mesh.actors.provider.endpoint import RetryDelays
from composer_mesh.actors.provider.errors import ProviderAuthError, ProviderBudgetError
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.budget import NANO, BudgetRules, Prices, dollars, nano
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer, TeacherFailure

OpenPanel = Callable[..., Awaitable[TeacherPanel]]
THREE = (teacher("a"), teacher("b"), teacher("c"))
FREE = Prices.per_million(0, 0)


@pytest.fixture
async def open_panel(tmp_path: Path) -> AsyncIterator[OpenPanel]:
    panels: list[TeacherPanel] = []

    async def open_one(provider: ScriptedProvider, **settings: Any) -> TeacherPanel:
        defaults: dict[str, Any] = {
            "teachers": THREE,
            "retries": RetryDelays(1),
            "budget": BudgetRules(usd=1.0),
            "ledger": tmp_path / "run" / "ledger.sqlite",
            "cache": tmp_path / "run" / "answers.sqlite",
        }
        told = PanelSettings(**{**defaults, **settings})
        panel = await TeacherPanel.open(told, environ=ENVIRON, transport=provider.transport)
        panels.append(panel)
        return panel

    yield open_one
    for panel in panels:
        await panel.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_each_teacher_answers_and_its_cost_is_counted(open_panel: OpenPanel) -> None:
    panel = await open_panel(ScriptedProvider(cost=0.0002))
    replies = await panel.ask(state(1), 3)
    assert [reply.teacher for reply in replies] == ["a", "b", "c"]
    assert {reply.action_text for reply in replies} == {"Answer: question 1"}
    assert [(reply.usd, reply.usd_known, reply.cached) for reply in replies] == [
        (0.0002, True, False)
    ] * 3
    assert (await panel.report()).run.spent == nano(0.0006)


async def test_the_states_seed_chooses_teachers_in_turns(open_panel: OpenPanel) -> None:
    panel = await open_panel(ScriptedProvider())
    asked = [[r.teacher for r in await panel.ask(state(number), 2)] for number in range(3)]
    assert asked == [["a", "b"], ["b", "c"], ["a", "c"]]
    for n in (0, 4):
        with pytest.raises(ValueError, match=f"n is {n}, but 3 teachers are loaded"):
            await panel.ask(state(0), n)


async def test_a_repeated_run_pays_nothing_whatever_its_seed(open_panel: OpenPanel) -> None:
    provider = ScriptedProvider()
    first = await open_panel(provider)
    paid = await first.ask(state(1), 3)
    await first.aclose()
    again = await open_panel(provider, run="another", budget=BudgetRules())
    free = await again.ask(state(1, seed=30), 3)
    assert [reply.action_text for reply in free] == [reply.action_text for reply in paid]
    assert {(reply.usd, reply.usd_known, reply.cached) for reply in free} == {(0.0, True, True)}
    assert len(provider.requests) == 3
    assert again.details()["replies"] == {"cached": 3}
    other = await again.ask(state(2), 3)
    assert [reply.kind for reply in other] == [FailureKind.BUDGET] * 3


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_tokens": 7}, {"model": "other"}])
async def test_a_question_that_is_asked_in_another_way_is_another_one(
    open_panel: OpenPanel, change: dict[str, Any]
) -> None:
    provider = ScriptedProvider()
    await (await open_panel(provider, teachers=(teacher("a"),))).ask(state(1), 1)
    await (await open_panel(provider, teachers=(teacher("a", **change),))).ask(state(1), 1)
    tools = [{"type": "function", "function": {"name": "t", "parameters": {}}}]
    await (await open_panel(provider, teachers=(teacher("a"),), tools=tools)).ask(state(1), 1)
    assert len(provider.requests) == 3


async def test_equal_questions_under_way_are_paid_once(open_panel: OpenPanel) -> None:
    provider = ScriptedProvider(cost=0.0003)
    panel = await open_panel(provider, cache=None)
    replies = await asyncio.gather(*(panel.ask(state(1, seed=0), 1) for _ in range(50)))
    assert len(provider.requests) == 1
    assert sum(reply.usd for (reply,) in replies) == pytest.approx(0.0003)
    assert sum(reply.cached for (reply,) in replies) == 49
    assert panel.details()["replies"] == {"answered": 1, "cached": 49}


async def test_teachers_that_are_asked_in_the_same_way_are_each_asked(
    open_panel: OpenPanel,
) -> None:
    provider = ScriptedProvider()
    twins = tuple(teacher(name, model="the same") for name in "abc")
    await (await open_panel(provider, teachers=twins)).ask(state(1), 3)
    assert len(provider.requests) == 3
    assert len({request["seed"] for request in provider.requests}) == 3
    replies = await (await open_panel(provider, teachers=twins)).ask(state(1), 3)
    assert len(provider.requests) == 3
    assert all(reply.cached for reply in replies)


@pytest.mark.parametrize("share", repeated([0.3, 1.1, 0.0, 0.05, 0.8], first=2))
async def test_a_thousand_questions_never_cost_more_than_the_ceiling(
    open_panel: OpenPanel, share: float
) -> None:
    provider = ScriptedProvider(cost=0.0004)
    settings = {"budget": BudgetRules(usd=1000 * 0.0004 * share), "cache": None}
    four = [await open_panel(provider, replicas=4, **settings) for _ in range(4)]
    asked = await asyncio.gather(*(four[n % 4].ask(state(n), 1) for n in range(1000)))
    answered = [reply for (reply,) in asked if isinstance(reply, TeacherAnswer)]
    refused = [reply for (reply,) in asked if isinstance(reply, TeacherFailure)]
    assert {reply.kind for reply in refused} <= {FailureKind.BUDGET}
    assert provider.charged == round(sum(reply.usd for reply in answered) * NANO)
    assert provider.charged <= nano(settings["budget"].usd)
    assert len(answered) >= 1000 * min(share, 1.0) - 160  # what 64 under way set aside above cost
    assert (await four[0].report()).run.spent == provider.charged


async def test_the_ceiling_of_one_teacher_leaves_the_others_alone(open_panel: OpenPanel) -> None:
    rules = BudgetRules(usd=1.0, per_teacher={"b": 0.0})
    replies = await (await open_panel(ScriptedProvider(), budget=rules)).ask(state(1), 3)
    assert [isinstance(reply, TeacherAnswer) for reply in replies] == [True, False, True]
    assert replies[1].kind is FailureKind.BUDGET
    assert "the ceiling of teacher 'b'" in replies[1].text


async def test_what_a_failed_question_cost_is_told_and_counted(open_panel: OpenPanel) -> None:
    provider = ScriptedProvider(say=lambda _: httpx.Response(500, text="no"))
    panel = await open_panel(provider, teachers=(teacher("a"),))
    (failed,) = await panel.ask(state(1), 1)
    assert failed.kind is FailureKind.SERVER
    report = await panel.report()
    assert failed.usd == dollars(report.run.spent) > 0
    about = panel.details()["teachers"]["a"]
    assert (about["failed"], about["usd"]) == ({"server": 1}, failed.usd)


async def test_the_runs_own_teachers_are_neither_metered_nor_kept(
    open_panel: OpenPanel, tmp_path: Path
) -> None:
    provider = ScriptedProvider(cost=0.0)
    own = tuple(replace(one, prices=FREE) for one in THREE)
    names = frozenset("abc")
    panel = await open_panel(provider, teachers=own, own=names, budget=BudgetRules())
    for seed in (1, 1, 4):
        replies = await panel.ask(state(1, seed=seed), 3)
        assert {(reply.usd, reply.usd_known, reply.cached) for reply in replies} == {
            (0.0, True, False)
        }
    assert len(provider.requests) == 9
    assert not (tmp_path / "run").exists()


async def test_missing_prices_are_read_from_the_providers_list(open_panel: OpenPanel) -> None:
    provider = ScriptedProvider()
    prices = {"prompt": "0.000001", "completion": "0.000002"}
    provider.listing = {"data": [{"id": "model-of-a", "pricing": prices}]}
    asked = teacher("a", prices=None, routing={})
    panel = await open_panel(provider, teachers=(asked,))
    (known,) = panel.teachers
    assert known.prices is not None
    assert known.prices.cost(1, 1) == 3000
    assert provider.paths == ["/v1/models"]
    (reply,) = await panel.ask(state(1), 1)
    assert reply.usd > 0


@pytest.mark.parametrize("routing", [None, {}])
async def test_unknown_prices_are_refused_unless_they_are_allowed(
    open_panel: OpenPanel, routing: dict[str, Any] | None
) -> None:
    asked = (teacher("a", prices=None, routing=routing),)
    with pytest.raises(ProviderBudgetError, match="the cost of a request is unknown"):
        await open_panel(ScriptedProvider(), teachers=asked)
    rules = BudgetRules(usd=0.05, unknown_prices="allow", assumed_usd=0.02)
    provider = ScriptedProvider(say=lambda _: answer("untold"))
    panel = await open_panel(provider, teachers=asked, budget=rules)
    replies = [(await panel.ask(state(number), 1))[0] for number in range(3)]
    assert [reply.usd for reply in replies] == [0.02, 0.02, 0.0]
    assert replies[0].usd_known is False
    assert replies[2].kind is FailureKind.BUDGET


async def test_what_would_stop_every_question_is_found_before_a_file_is_made(
    open_panel: OpenPanel, tmp_path: Path
) -> None:
    keyless = replace(teacher("a"), api_key_env="NO_SUCH_KEY")
    with pytest.raises(ProviderAuthError, match="NO_SUCH_KEY is not set"):
        await open_panel(ScriptedProvider(), teachers=(keyless,))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="teachers holds 'a' more than once"):
        await open_panel(ScriptedProvider(), teachers=(teacher("a"), teacher("a")))
    (tmp_path / "text").write_text("no database " * 99)
    for name, purpose in (("ledger", "the ledger"), ("cache", "models' answers")):
        with pytest.raises(StoreError, match=f"cannot keep {purpose}"):
            await open_panel(ScriptedProvider(), **{name: tmp_path / "text"})


async def test_a_cache_that_breaks_costs_neither_the_run_nor_more_money(
    open_panel: OpenPanel, tmp_path: Path
) -> None:
    provider = ScriptedProvider()
    provider.gate.clear()
    panel = await open_panel(provider, teachers=(teacher("a"),))
    asking = asyncio.create_task(panel.ask(state(1), 1))
    await provider.asked.wait()
    with sqlite3.connect(tmp_path / "run" / "answers.sqlite") as rows:
        rows.execute("DROP TABLE kept")
    rows.close()
    provider.gate.set()
    (reply,) = await asking
    assert isinstance(reply, TeacherAnswer)
    (refused,) = await panel.ask(state(2), 1)
    assert (refused.kind, len(provider.requests)) == (FailureKind.BUDGET, 1)
    assert "cannot keep models' answers" in refused.text
    assert panel.details()["unkept_answers"] == 1


async def test_an_answer_that_nobody_waits_for_any_more_is_kept(open_panel: OpenPanel) -> None:
    provider = ScriptedProvider()
    provider.gate.clear()
    panel = await open_panel(provider, teachers=(teacher("a"),))
    asking = asyncio.create_task(panel.ask(state(1), 1))
    await provider.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    provider.gate.set()
    (reply,) = await panel.ask(state(1), 1)
    assert (reply.cached, len(provider.requests)) == (True, 1)


async def test_a_closed_panel_has_charged_what_was_under_way(
    open_panel: OpenPanel, tmp_path: Path
) -> None:
    provider = ScriptedProvider()
    provider.gate.clear()
    panel = await open_panel(provider)
    asking = asyncio.create_task(panel.ask(state(1), 3))
    await provider.asked.wait()
    await panel.aclose()
    with pytest.raises(ClientClosed, match="open another one and query again"):
        await asking
    with pytest.raises(ClientClosed):
        await panel.ask(state(1), 3)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite", BudgetRules(), "run")
    account = ledger.report().run
    ledger.close()
    assert (account.spent > 0, account.reserved) == (True, 0)


async def test_details_are_plain_and_hold_no_key(open_panel: OpenPanel, tmp_path: Path) -> None:
    provider = ScriptedProvider(say=lambda _: answer(f"your key is {KEY}", 0.0001))
    panel = await open_panel(provider)
    replies = await panel.ask(state(1), 3)
    told = json.dumps(panel.details())
    assert json.loads(told)["teachers"]["a"]["breaker"] == "closed"
    assert panel.details()["budget"]["spent_usd"] == pytest.approx(0.0003)
    await panel.aclose()
    files = b"".join(path.read_bytes() for path in (tmp_path / "run").iterdir())
    assert KEY not in told + repr(replies)
    assert KEY.encode() not in files


async def test_one_question_to_one_judge_is_paid_once_also_by_a_resumed_run(
    open_panel: OpenPanel,
) -> None:
    provider = ScriptedProvider(cost=0.0002)
    asked = [{"role": "user", "content": "good?"}]
    first = await open_panel(provider, role="judge", section="judges")
    answer = await first.ask_one("b", asked)
    assert isinstance(answer, TeacherAnswer)
    assert (answer.teacher, answer.action_text) == ("b", "Answer: good?")
    resumed = await open_panel(provider, role="judge", section="judges")
    again = await resumed.ask_one("b", asked)
    assert isinstance(again, TeacherAnswer)
    assert (again.cached, again.usd, len(provider.requests)) == (True, 0.0, 1)
    assert dollars((await resumed.report()).run.spent) == 0.0002
    with pytest.raises(ValueError, match="no judge 'd': name one of a, b, c"):
        await resumed.ask_one("d", asked)


async def test_a_refused_question_names_the_key_of_the_judges(open_panel: OpenPanel) -> None:
    budget = BudgetRules(usd=1e-6)
    panel = await open_panel(ScriptedProvider(), role="judge", section="judges", budget=budget)
    refused = await panel.ask_one("a", [{"role": "user", "content": "good?"}])
    assert isinstance(refused, TeacherFailure)
    assert refused.kind is FailureKind.BUDGET
    assert refused.text.startswith("judge 'a': a request of up to $")
    assert "raise judges.budget.usd or the max_usd of this judge" in refused.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def kept_answer(text: str) -> TeacherAnswer:
    message = {"role": "assistant", "content": text}
    return TeacherAnswer("a", text, message, usd=0.5, usd_known=False, latency_s=2.0, model="m")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(), st.text()), max_size=9))
def test_the_first_answer_to_a_key_comes_back_free_and_under_the_name_that_asks(
    kept: list[tuple[str, str]],
) -> None:
    expected: dict[str, TeacherAnswer] = {}
    with TemporaryDirectory() as folder:
        store = ResponseCache(Path(folder) / "c")
        for key, text in kept:
            store.put(key, kept_answer(text))
            free = replace(kept_answer(text), teacher="b", usd=0.0, usd_known=True, cached=True)
            expected.setdefault(key, free)
        assert {key: store.get(key, "b") for key in expected} == expected
        assert store.get("another " + "".join(expected), "b") is None
        store.close()


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_a_key_does_not_depend_on_the_order_of_keys(content: dict[str, object]) -> None:
    turned = dict(reversed(content.items()))
    assert content_key(content) == content_key(turned)
    assert content_key(content) != content_key([content])


def test_several_processes_connections_share_a_file(tmp_path: Path) -> None:
    stores = [ResponseCache(tmp_path / "deep" / "c") for _ in range(4)]

    def put(number: int) -> None:
        stores[number % 4].put(f"key {number % 50}", kept_answer(f"text {number % 50}"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(put, range(200)))
    for store in stores:
        found = [store.get(f"key {number}", "a") for number in range(50)]
        texts = [one.action_text for one in found if one is not None]
        assert texts == [f"text {number}" for number in range(50)]
        store.close()


def test_its_file_is_its_owners_alone_and_an_older_mode_is_kept(tmp_path: Path) -> None:
    mine, older = tmp_path / "mine", tmp_path / "older"
    older.touch(0o640)
    older.chmod(0o640)
    for path in (mine, older):
        ResponseCache(path).close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    assert stat.S_IMODE(older.stat().st_mode) == 0o640


def test_a_file_that_cannot_be_a_cache_is_named_with_the_repair(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be read as one" * 40)
    Ledger(tmp_path / "ledger", BudgetRules(), "run").close()
    for name, reason in (("text", "not a database"), ("ledger", "of another kind")):
        with pytest.raises(StoreError, match=rf"cannot keep models' answers .*{reason}.*a\.key"):
            ResponseCache(tmp_path / name, "a.key")


@pytest.mark.parametrize("value", ["{", "nonsense", b"\xff\xfe", "[" * 100_000, '["no answer"]'])
def test_a_damaged_value_is_an_error_and_no_silent_miss(tmp_path: Path, value: object) -> None:
    store = ResponseCache(tmp_path / "c")
    with sqlite3.connect(tmp_path / "c") as rows:
        rows.execute("INSERT INTO kept VALUES ('k', ?)", (value,))
    rows.close()
    with pytest.raises(StoreError, match="the value of k is damaged"):
        store.get("k", "a")
    store.close()
