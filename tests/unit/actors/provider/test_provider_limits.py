"""When a provider is asked again, and when it is not asked at all."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_provider import (
    ASK,
    KEY,
    TEACHER,
    TOOLS,
    CeilingMeter,
    Script,
    ask,
    client,
    error,
    fault,
    in_simulated_time,
    said,
)

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderBudgetError,
    ProviderCrowded,
    ProviderError,
    ProviderRateError,
    ProviderServerError,
    ProviderSuspended,
    ProviderTimeout,
)
from composer_mesh.actors.provider.request_limiter import BreakerRules, StartLimiter


@in_simulated_time
async def test_waits_are_jittered_and_bounded() -> None:
    script = Script(*[error(500)] * 7, said("x"))
    await ask(script, attempts=8, base_s=0.25)
    assert len(set(script.waits)) == 7
    assert all(wait <= min(8.0, 0.25 * 2**n) for n, wait in enumerate(script.waits, 1))


@in_simulated_time
async def test_waits_stay_within_their_cap_however_many_there_were() -> None:
    script = Script(*(error(500) for _ in range(1500)), said("x"))
    await ask(script, attempts=1501, base_s=0.25, total_s=1e9)
    assert 7.0 < max(script.waits) <= 8.0


@in_simulated_time
async def test_retry_after_is_the_least_wait() -> None:
    script = Script(error(429, retry_after="7"), said("x"))
    await ask(script, base_s=0.25)
    assert 7.0 <= script.waits[0] <= 7.25


@in_simulated_time
async def test_a_retry_after_beyond_the_total_is_not_waited_for() -> None:
    script = Script(error(429, retry_after="3600"))
    failure = await fault(script)
    assert isinstance(failure, ProviderRateError)
    assert (failure.retry_after_s, len(script.requests)) == (3600.0, 1)


@in_simulated_time
async def test_a_hang_ends_at_the_total_timeout() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    transport = httpx.MockTransport(hang)
    async with ProviderClient(Timeouts(0.05), environ={"TEST_KEY": KEY}, transport=transport) as c:
        with pytest.raises(
            ProviderTimeout, match=r"no answer within 0\.05 s: raise replay\.timeout"
        ):
            await c.complete(TEACHER, ASK, TOOLS, seed=0)


@in_simulated_time
async def test_a_slow_drip_ends_at_the_total_timeout() -> None:
    class Drip(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.001)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=Drip()))
    async with ProviderClient(Timeouts(0.05), environ={"TEST_KEY": KEY}, transport=transport) as c:
        with pytest.raises(ProviderTimeout, match="no answer within"):
            await c.complete(TEACHER, ASK, TOOLS, seed=0)


@in_simulated_time
async def test_a_refusal_with_a_wish_holds_all_questions_of_its_teacher() -> None:
    script = Script(error(429, retry_after="7"), said("x"), said("y"))
    async with client(script, attempts=1) as asking:
        with pytest.raises(ProviderRateError):
            await asking.complete(TEACHER, ASK, TOOLS, seed=0)
        await asking.complete(TEACHER, ASK, TOOLS, seed=1)
        await asyncio.sleep(7.0)
        await asking.complete(TEACHER, ASK, TOOLS, seed=2)
    assert script.waits == [7.0, 7.0]


@in_simulated_time
@pytest.mark.parametrize(
    ("limit", "spacing_s"), [({"concurrency": 4}, 0.5), ({"requests_per_minute": 30}, 2.0)]
)
async def test_requests_held_by_a_retry_after_start_one_after_another_or_at_their_rate(
    limit: dict[str, Any], spacing_s: float
) -> None:
    script, teacher = (
        Script(error(429, retry_after="8"), *[said("x")] * 4),
        replace(TEACHER, **limit),
    )
    async with client(script, attempts=1) as asking:
        with pytest.raises(ProviderRateError):
            await asking.complete(teacher, ASK, TOOLS, seed=0)
        await asyncio.gather(
            *(asking.complete(teacher, ASK, TOOLS, seed=seed) for seed in range(4))
        )
    assert script.waits == [8.0, *[spacing_s] * 3]


@in_simulated_time
async def test_requests_refused_together_do_not_return_together() -> None:
    together, times = asyncio.Barrier(4), []

    async def refuse_four(request: httpx.Request) -> httpx.Response:
        times.append(round(asyncio.get_running_loop().time(), 6))
        if len(times) > 4:
            return said("x")
        await together.wait()
        return error(429, retry_after="8")

    teacher = TeacherEndpoint("t", "https://x.test", "m", concurrency=4)
    transport, retries = httpx.MockTransport(refuse_four), RetryDelays(2, base_s=0.0)
    async with ProviderClient(Timeouts(60.0), retries, transport=transport) as asking:
        await asyncio.gather(*(asking.complete(teacher, ASK, [], seed=seed) for seed in range(4)))
    assert times == [0.0] * 4 + [8.0, 8.5, 9.0, 9.5]


@in_simulated_time
async def test_a_pause_beyond_a_questions_time_ends_it_at_once() -> None:
    script = Script(error(429, retry_after="8"))
    async with client(script, attempts=1, total_s=5.0) as asking:
        for kind in (ProviderRateError, ProviderCrowded):
            with pytest.raises(kind):
                await asking.complete(TEACHER, ASK, TOOLS, seed=0)
    assert asyncio.get_running_loop().time() < 1.0


@in_simulated_time
async def test_one_wish_does_not_hold_a_teacher_longer_than_a_breaker_would() -> None:
    script = Script(error(429, retry_after="9999"), said("x"))
    rules = BreakerRules(failures=99, rest_s=30.0)
    async with client(script, breaker=rules, attempts=1) as asking:
        with pytest.raises(ProviderRateError):
            await asking.complete(TEACHER, ASK, TOOLS, seed=0)
        await asking.complete(TEACHER, ASK, TOOLS, seed=1)
    assert script.waits == [30.0]


@in_simulated_time
async def test_a_teacher_that_fails_in_a_row_is_left_alone_and_tried_again() -> None:
    script = Script(*[error(500, "broken")] * 3, said("x"), said("y"))
    rules = BreakerRules(failures=3, rest_s=20.0)
    async with client(script, breaker=rules, attempts=1) as asking:
        for seed in range(3):
            with pytest.raises(ProviderServerError):
                await asking.complete(TEACHER, ASK, TOOLS, seed=seed)
        assert asking.details()["t1"]["breaker"] == "open"
        with pytest.raises(ProviderSuspended, match=r"failed in a row .*broken.* waits 20 s"):
            await asking.complete(TEACHER, ASK, TOOLS, seed=4)
        assert len(script.requests) == 3
        await asyncio.sleep(20)
        assert asking.details()["t1"]["breaker"] == "half_open"
        await asking.complete(TEACHER, ASK, TOOLS, seed=5)
        details = asking.details()["t1"]
    assert (details["breaker"], details["opened"]) == ("closed", 1)
    assert details["counts"] == {"server": 3, "suspended": 1, "answered": 1}
    assert (details["under_way"], details["waiting"]) == (0, 0)


async def test_a_question_does_not_wait_for_a_teacher_that_will_still_rest() -> None:
    script = Script(*[error(500)] * 2)
    failure = await fault(script, breaker=BreakerRules(failures=2, rest_s=30.0))
    assert isinstance(failure, ProviderServerError)
    assert len(script.requests) == 2


async def test_another_teacher_is_not_left_alone_with_it() -> None:
    script = Script(error(500), said("x"))
    async with client(script, breaker=BreakerRules(failures=1), attempts=1) as asking:
        with pytest.raises(ProviderServerError):
            await asking.complete(TEACHER, ASK, TOOLS, seed=0)
        await asking.complete(replace(TEACHER, name="t2"), ASK, TOOLS, seed=0)


class Busy:
    """Answers when it is told to; knows how many requests are under way."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.gate, self.full = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == 3:
            self.full.set()
        try:
            await self.gate.wait()
        finally:  # also where the asker has given it up
            self.now -= 1
        return said("x")


async def test_no_more_requests_are_under_way_than_the_teachers_concurrency() -> None:
    busy, teacher = Busy(), TeacherEndpoint("t", "https://x.test", "m", concurrency=3)
    async with ProviderClient(Timeouts(60.0), transport=httpx.MockTransport(busy)) as asking:
        questions = [
            asyncio.create_task(asking.complete(teacher, ASK, [], seed=seed)) for seed in range(9)
        ]
        await busy.full.wait()
        assert (asking.details()["t"]["under_way"], asking.details()["t"]["waiting"]) == (3, 6)
        busy.gate.set()
        await asyncio.gather(*questions)
    assert busy.most == 3


async def test_a_question_that_gets_no_slot_in_its_time_ends_unsent() -> None:
    busy, teacher = Busy(), TeacherEndpoint("t", "https://x.test", "m", concurrency=1)
    transport = httpx.MockTransport(busy)
    async with ProviderClient(Timeouts(0.1), RetryDelays(1), transport=transport) as asking:
        ends = await asyncio.gather(
            *(asking.complete(teacher, ASK, [], seed=seed) for seed in range(2)),
            return_exceptions=True,
        )
    assert isinstance(ends[0], ProviderTimeout)
    assert isinstance(ends[1], ProviderCrowded | ProviderTimeout)
    assert busy.most == 1


@in_simulated_time
async def test_requests_a_minute_are_kept_by_waiting() -> None:
    script, teacher = Script(*[said("x")] * 5), replace(TEACHER, requests_per_minute=2)
    async with client(script, total_s=1000.0) as asking:
        for seed in range(5):
            await asking.complete(teacher, ASK, TOOLS, seed=seed)
    assert script.waits == [30.0] * 4


@in_simulated_time
async def test_a_question_that_gets_no_start_in_its_time_ends_unsent() -> None:
    script, teacher = Script(said("x"), said("y")), replace(TEACHER, requests_per_minute=1)
    async with client(script, total_s=31.0) as asking:
        await asking.complete(teacher, ASK, TOOLS, seed=0)
        with pytest.raises(ProviderCrowded, match=r"no request may start in the time .*raise its"):
            await asking.complete(teacher, ASK, TOOLS, seed=1)
        assert len(script.requests) == 1
        await asking.complete(teacher, ASK, TOOLS, seed=2)
    assert script.waits == [60.0]


@in_simulated_time
async def test_a_patient_job_waits_in_line_beyond_the_total() -> None:
    script, teacher = Script(*[said("x")] * 3), replace(TEACHER, requests_per_minute=1)
    async with client(script, total_s=30.0, line_s=float("inf")) as asking:
        for seed in range(3):
            await asking.complete(teacher, ASK, TOOLS, seed=seed)
    assert script.waits == [60.0, 60.0]


async def test_a_question_in_line_is_not_sent_to_a_teacher_that_failed_meanwhile() -> None:
    asked, gate, sent = asyncio.Event(), asyncio.Event(), []

    async def fail(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        asked.set()
        await gate.wait()
        return error(500)

    teacher = TeacherEndpoint("t", "https://x.test", "m", concurrency=1)
    async with ProviderClient(
        Timeouts(60.0),
        RetryDelays(1),
        BreakerRules(failures=1),
        transport=httpx.MockTransport(fail),
    ) as asking:
        first, second = (
            asyncio.create_task(asking.complete(teacher, ASK, [], seed=seed)) for seed in range(2)
        )
        await asked.wait()
        assert asking.details()["t"]["waiting"] == 1
        gate.set()
        ends = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(end) for end in ends] == [ProviderServerError, ProviderSuspended]
    assert len(sent) == 1


async def test_refusals_of_a_question_do_not_count_against_its_teacher() -> None:
    flagged = httpx.Response(400, json={"error": {"code": "content_filter"}})
    replies = [error(429), error(400), flagged, error(404)]
    async with client(Script(*replies), breaker=BreakerRules(1), attempts=1) as asking:
        for seed in range(len(replies)):
            with pytest.raises(ProviderError):
                await asking.complete(TEACHER, ASK, TOOLS, seed=seed)
        with pytest.raises(ProviderBudgetError):
            await asking.complete(TEACHER, ASK, TOOLS, seed=9, meter=CeilingMeter(0))
        assert asking.details()["t1"]["breaker"] == "closed"


@in_simulated_time
async def test_a_question_that_waits_for_its_minute_waits_for_a_later_wish_too() -> None:
    limiter, times = StartLimiter(1, concurrency=2), []

    async def start() -> None:
        await limiter.acquire()
        times.append(round(asyncio.get_running_loop().time()))

    first, second = asyncio.create_task(start()), asyncio.create_task(start())
    await first
    await asyncio.sleep(50.0)
    limiter.pause(30.0)
    await second
    assert times == [0, 120]


@in_simulated_time
async def test_a_patient_job_does_not_wait_longer_for_an_answer() -> None:
    timeouts, transport = Timeouts(0.05, line_s=float("inf")), httpx.MockTransport(Busy())
    teacher = TeacherEndpoint("t", "https://x.test", "m")
    async with ProviderClient(timeouts, transport=transport) as asking:
        with pytest.raises(ProviderTimeout):
            await asking.complete(teacher, ASK, [], seed=0)
