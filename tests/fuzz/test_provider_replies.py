"""30,000 hostile replies: each ends as an answer or as a typed failure, within its price."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from hostile_replies import HostileReplies
from simulated_time import SimulatedLoop

from composer_mesh.actors.panel.ledger import Ledger
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, Secret, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderError, ProviderMalformed
from composer_mesh.actors.provider.money import routing_of
from composer_mesh.actors.provider.reply import (
    NoResponse,
    ProviderReply,
    RefusedReply,
    bounded_body,
    read_reply,
)
from composer_mesh.actors.provider.request_limiter import BreakerRules
from composer_mesh.rollouts.budget import LARGEST_CHARGE, BudgetRules, Prices, ceiling
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.hints import one_line_hint
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer

Cases = Callable[[int], Iterator[int]]
TEACHER = TeacherEndpoint("t", "https://provider.test/v1", "some/model", "KEY", max_tokens=100)
PRICED = Prices(Decimal("1e-6"), Decimal("1e-6"))
ANSWERS = TypeAdapter(TeacherAnswer)
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]
KEY = "sk-secret-0123456789"
CEILING_USD = 1000.0
A_CLIENT = 20
"""Queries for which a client is used: each has a teacher of its own, whose ledger row is reused."""


class LedgerMeter:
    """A meter that writes to its ledger at once, without a thread."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def reserve(self, teacher: str, bound: int | None) -> int:
        return self.ledger.reserve(teacher, bound).number

    async def settle(self, reservation: int, charge: int | None) -> int:
        return self.ledger.settle(reservation, charge)


class Asking:
    """Clients of one provider, whose replies are those of a seed."""

    def __init__(self) -> None:
        self.ledger = Ledger(None, BudgetRules(usd=CEILING_USD), "run")
        self.ends = Counter[str]()
        self._replies, self._asked = HostileReplies(0, ""), 0
        self._client = self._new_client()

    async def query(self, seed: int) -> None:
        asking, teacher = (
            self._seeded(seed, "query"),
            replace(TEACHER, name=f"t{seed % A_CLIENT}", prices=PRICED),
        )
        before = self.ledger.run_account().spent
        try:
            meter = LedgerMeter(self.ledger)
            check_answer(await asking.complete(teacher, ASK, [], seed=0, meter=meter))
            self.ends["answered"] += 1
        except ProviderError as error:
            check_failure(error)
            self.ends[error.kind.value] += 1
        after = self.ledger.run_account()
        assert 0 <= after.spent - before <= 2 * PRICED.bound(1000, 100)
        assert (after.reserved, after.overruns) == (0, 0)

    async def prices(self, seed: int) -> None:
        try:
            found = await self._seeded(seed, "prices").prices(TEACHER)
        except ProviderError as error:
            check_failure(error)
            self.ends[error.kind.value] += 1
            return
        self.ends["priced" if found else "unpriced"] += 1
        if found is not None:
            assert 0 <= found.bound(10**6, 10**6) <= ceiling(10**9) * 10**7
            assert routing_of(replace(TEACHER, prices=found, routing={}))["max_price"]

    async def read(self, seed: int) -> None:
        """Read a reply as the client does, without its connections, limits and retries."""
        sent = HostileReplies(seed, "read").completion()
        reply: ProviderReply | NoResponse
        try:
            raw = await bounded_body(sent)
        except (RefusedReply, httpx.ReadError) as error:
            reply = NoResponse(ProviderMalformed("t", str(error)), sent=True)
        else:
            headers = {name.lower(): text for name, text in sent.headers.items()}
            reply = ProviderReply(sent.status_code, headers, raw, "asked-0", Secret(KEY))
        reading = read_reply(replace(TEACHER, prices=PRICED), reply, "call_0")
        assert reading.charge is None or 0 <= reading.charge <= LARGEST_CHARGE
        if isinstance(reading.outcome, ProviderError):
            check_failure(reading.outcome)
            self.ends[reading.outcome.kind.value] += 1
        else:
            check_answer(reading.outcome)
            self.ends["answered"] += 1

    def _seeded(self, seed: int, test: str) -> ProviderClient:
        self._replies, self._asked = HostileReplies(seed, test), self._asked + 1
        if self._asked % A_CLIENT == 0:
            self._client = self._new_client()
        return self._client

    def _new_client(self) -> ProviderClient:
        return ProviderClient(
            Timeouts(total_s=60.0),
            RetryDelays(attempts=2),
            BreakerRules(failures=10**9),
            environ={"KEY": KEY},
            transport=httpx.MockTransport(self._reply),
        )

    def _reply(self, request: httpx.Request) -> httpx.Response:
        asks_prices = request.url.path.endswith("/models")
        return self._replies.listing() if asks_prices else self._replies.completion()


def check_failure(error: ProviderError) -> None:
    assert str(error).isprintable()
    assert len(str(error)) < 600
    assert KEY not in str(error)
    assert error.retry_after_s is None or 0 <= error.retry_after_s < 10**8


def check_answer(answer: TeacherAnswer) -> None:
    """Do what a run, a replay and a hint writer do with an answer."""
    assert canonical_action(answer.action_text).kind in ("call", "number", "words", "malformed")
    assert one_line_hint(answer.action_text).isprintable()
    assert ANSWERS.validate_json(ANSWERS.dump_json(answer)) == answer


def after_all(
    ask: Callable[[Asking, int], Coroutine[Any, Any, None]], seeds: Iterator[int]
) -> Asking:
    """Ask with each seed, in simulated time: nothing waits."""

    async def run() -> Asking:
        asking = Asking()
        for seed in seeds:
            try:
                await ask(asking, seed)
            except Exception as error:
                error.add_note(f"the seed is {seed}")
                raise
        return asking

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def test_every_reply_is_an_answer_or_a_typed_failure_within_its_price(cases: Cases) -> None:
    asking = after_all(Asking.query, cases(2_000))
    assert {"answered", *FailureKind} - set(asking.ends) <= {"budget", "suspended"}


def test_every_reply_is_read_as_an_answer_or_a_typed_failure(cases: Cases) -> None:
    asking = after_all(Asking.read, cases(4_500))
    assert {"answered", *FailureKind} - set(asking.ends) <= {"budget", "suspended"}


def test_every_price_list_is_read_or_a_typed_failure(cases: Cases) -> None:
    asking = after_all(Asking.prices, cases(1_000))
    assert {"priced", "unpriced", "malformed", "rate"} <= set(asking.ends)
