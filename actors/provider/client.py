"""The client of the teachers' providers: sends queries, with bounded retries.

Speaks the OpenAI chat protocol, and OpenRouter's extensions for OpenRouter endpoints. Failure
handling is in `errors`, rate limits in `request_limiter`, costs in `money`, and what is read of a
response in `reply`. Budget ceilings, votes and actors are other layers' concerns.

HTTP/2 where a provider offers it, one pool for all teachers. The pool is unbounded, because callers
limit the number of concurrent requests. Request coalescing: concurrent equal queries share one
request.
"""

import asyncio
import hashlib
import json
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    wait_random,
    wait_random_exponential,
)

from composer_mesh.actors.provider.endpoint import (
    RetryDelays,
    Secret,
    TeacherEndpoint,
    Timeouts,
    read_key,
    warn_if_others_can_read,
)
from composer_mesh.actors.provider.errors import (
    ProviderBudgetError,
    ProviderError,
    ProviderMalformed,
    ProviderRequestError,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider.money import (
    Bill,
    Meter,
    bound,
    listed_prices,
    routing_of,
)
from composer_mesh.actors.provider.reply import (
    NoResponse,
    ProviderReply,
    RefusedReply,
    bounded_body,
    read_completion,
    read_reply,
)
from composer_mesh.actors.provider.request_limiter import BreakerRules, Deadline, RequestLimiter
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.budget import Prices, dollars
from composer_mesh.rollouts.pairs import TeacherAnswer
from composer_mesh.rollouts.traces import Message

T = TypeVar("T")


class ClientClosed(Worded, Exception):
    """The client was closed before a query had its answer."""

    message = "this client is closed: open another one and query again"


class RequestCoalescer(Generic[T]):
    """Coalesces the requests of one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}

    async def get(self, key: str, request: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """Return the answer, and whether it came from an equal query already in flight.

        A request continues if its callers are cancelled. Raises ClientClosed once this is closed.
        """
        task, shared = self._tasks.get(key), True
        if task is None:
            task, shared = asyncio.create_task(request()), False
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        try:
            return await asyncio.shield(task), shared
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise ClientClosed from None
            raise

    async def aclose(self) -> None:
        """Cancel running requests. Waits until they have ended."""
        await cancel_and_wait(self._tasks.values())


ID_DIGITS = 24
RETRIES, BREAKER = RetryDelays(), BreakerRules()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to a teacher's `path`: a POST if it has content.

    `call_id` is that of a call in its answer.
    """

    teacher: TeacherEndpoint
    path: str
    content: bytes | None = None
    request_id: str = ""
    call_id: str = ""

    def headers(self, secret: Secret) -> dict[str, str]:
        if self.content is None:
            return secret.headers
        own = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        return {**own, **secret.headers}


class ProviderClient:
    """Queries any teacher for its next action; safe for many tasks of one event loop.

    Limits and breaker are per teacher name: names must be unique.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        retries: RetryDelays = RETRIES,
        breaker: BreakerRules = BREAKER,
        *,
        environ: Mapping[str, str] = os.environ,
        transport: httpx.AsyncBaseTransport | None = None,
        give_up: asyncio.Event | None = None,
    ) -> None:
        """With `give_up` queries wait for suspended teachers until it is set."""
        self._timeouts, self._retries, self._rules = timeouts, retries, breaker
        self._give_up = give_up
        self._environ = environ
        self._limiters: dict[str, RequestLimiter] = {}
        self._warned: set[Path] = set()
        self._overcharged: dict[str, str] = {}
        self._transport = HttpTransport(timeouts, transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, so that running requests fail."""
        await self._transport.aclose()

    def check(self, teacher: TeacherEndpoint) -> None:
        """Raise any error that would stop all requests to this teacher; sends nothing."""
        read_key(teacher, self._environ)
        teacher.check_address()
        path = teacher.api_key_file
        if path is not None and path not in self._warned:
            self._warned.add(path)
            warn_if_others_can_read(path)

    async def complete(
        self,
        teacher: TeacherEndpoint,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        seed: int,
        meter: Meter | None = None,
    ) -> TeacherAnswer:
        """Return the teacher's next action; raises a ProviderError, which has the `charged` amount.

        Waits at most `total_s`, plus the meter's writes. If cancelled, it closes its request and
        charges everything it had reserved.
        """
        limiter, started = self._limiter(teacher), time.perf_counter()
        bill = Bill(None, teacher.name, None)
        try:
            self.check(teacher)
            self._refuse_overcharging(teacher)
            question = _question(teacher, messages, tools, seed)
            most = bound(teacher, len(question.content or b""))
            bill = Bill(meter, teacher.name, most)
            answer = await self._persist(limiter, partial(self._ask, limiter, question, bill))
        except ProviderError as error:
            error.charged = bill.charged
            limiter.counts[error.kind.value] += 1
            raise
        limiter.counts["answered"] += 1
        return replace(
            answer,
            usd=dollars(bill.charged),
            usd_known=bill.known,
            latency_s=time.perf_counter() - started,
        )

    async def prices(self, teacher: TeacherEndpoint) -> Prices | None:
        """Return the teacher's prices in its provider's model list; None if it lists none.

        Reads the list, which is free; raises a ProviderError if it cannot.
        """
        self.check(teacher)
        limiter = RequestLimiter(teacher, self._rules)
        listing = await self._persist(limiter, partial(self._list_models, limiter, teacher))
        return listed_prices(listing, teacher.model)

    def details(self) -> dict[str, Any]:
        """Return by teacher: breaker state, running and waiting requests, results by kind."""
        return {name: limiter.details() for name, limiter in self._limiters.items()}

    async def _persist(
        self, limiter: RequestLimiter, attempt: Callable[[int, Deadline], Awaitable[T]]
    ) -> T:
        """Retry until success, a final error, the last attempt or the deadline."""
        deadline = Deadline.of(self._timeouts)

        def give_up(state: RetryCallState) -> bool:
            tried, wait_s = state.attempt_number, state.upcoming_sleep
            hopeless = wait_s >= deadline.left_s or limiter.rests_for(wait_s)
            return tried >= self._retries.attempts or hopeless

        async for tried in AsyncRetrying(
            retry=retry_if_exception(_may_succeed_later),
            wait=partial(_delay_s, self._retries),
            stop=give_up,
            reraise=True,
        ):
            with tried:
                return await attempt(tried.retry_state.attempt_number - 1, deadline)
        raise AssertionError("the last attempt neither returned nor raised")

    async def _ask(
        self,
        limiter: RequestLimiter,
        question: Outgoing,
        bill: Bill,
        number: int,
        deadline: Deadline,
    ) -> TeacherAnswer:
        """Run one attempt: wait for the limits, reserve, send, settle."""
        teacher = question.teacher
        async with limiter.turn(deadline):
            secret = read_key(teacher, self._environ)
            outgoing = replace(question, request_id=f"{question.request_id}-{number}")
            async with bill.attempt() as attempt:
                deadline.leave_line()
                reply = await self._transport.send(outgoing, secret, deadline.left_s)
                reading = read_reply(teacher, reply, question.call_id)
                attempt.charge = reading.charge
            if bill.overcharge:
                self._overcharged[teacher.name] = _overcharge_text(bill)
            return reading.answer()

    def _refuse_overcharging(self, teacher: TeacherEndpoint) -> None:
        """Raise ProviderBudgetError if the teacher's provider has stated more than its prices."""
        if (text := self._overcharged.get(teacher.name)) is not None:
            raise ProviderBudgetError(teacher.name, text)

    async def _list_models(
        self, limiter: RequestLimiter, teacher: TeacherEndpoint, _: int, deadline: Deadline
    ) -> dict[str, Any]:
        """Make one attempt to read the provider's model list."""
        async with limiter.turn(deadline):
            deadline.leave_line()
            secret = read_key(teacher, self._environ)
            reply = await self._transport.send(Outgoing(teacher, "models"), secret, deadline.left_s)
            if isinstance(reply, NoResponse):
                raise reply.error
            return read_completion(teacher.name, reply, reply.body())

    def _limiter(self, teacher: TeacherEndpoint) -> RequestLimiter:
        limiter = self._limiters.get(teacher.name)
        if limiter is None:
            limiter = RequestLimiter(teacher, self._rules, self._give_up)
            self._limiters[teacher.name] = limiter
        elif limiter.teacher != teacher:
            raise ValueError(
                f"two different teachers are named {teacher.name!r}, so one's failures would "
                "count against the other: give each its own name"
            )
        return limiter


def _may_succeed_later(failure: BaseException) -> bool:
    return isinstance(failure, ProviderError) and failure.retryable


def _delay_s(retries: RetryDelays, state: RetryCallState) -> float:
    """Return the wait before the next attempt: full jitter, on top of any Retry-After."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, ProviderError) and error.retry_after_s is not None:
        return error.retry_after_s + wait_random(0, retries.base_s)(state)
    return wait_random_exponential(multiplier=2 * retries.base_s, max=retries.cap_s)(state)


def _overcharge_text(bill: Bill) -> str:
    return (
        f"its provider stated ${dollars(bill.overcharge):.6f} for a request that costs at most "
        f"${dollars(bill.bound or 0):.6f} at its known prices: no ceiling could hold, so it is "
        "not queried again"
    )


def _question(
    teacher: TeacherEndpoint,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    seed: int,
) -> Outgoing:
    body: dict[str, Any] = {
        "model": teacher.model,
        "messages": list(messages),
        "max_tokens": teacher.max_tokens,
    }
    # Where providers must honour every parameter, a seed would exclude models without one.
    if not (teacher.routing or {}).get("require_parameters"):
        body["seed"] = seed
    if teacher.temperature is not None:
        body["temperature"] = teacher.temperature
    if tools:
        body |= {"tools": list(tools), "tool_choice": "auto"}
    if teacher.routing is not None:
        body |= {"usage": {"include": True}, "provider": routing_of(teacher)}
    try:
        content = json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise ProviderRequestError(teacher.name, "the question cannot be written as JSON") from None
    request_id = hashlib.sha256(teacher.name.encode() + b"\n" + content).hexdigest()[:ID_DIGITS]
    turn = sum(message["role"] == "assistant" for message in messages)
    return Outgoing(teacher, "chat/completions", content, request_id, f"call_{turn}")


KEPT_S = 30.0
"""Seconds an idle connection is kept for the next request."""
LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")
WIRE_LOGS = ("hpack", "httpcore", "httpx")
"""Loggers that write headers, which contain the key, and a line per request."""


class NoCookies(CookieJar):
    """A jar that stays empty: a provider sets no state, and its dates are not parsed."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Ignore the response's cookies."""


@cache
def _authorities(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Return httpx's context, which reads these variables; loading it takes up to 0.1 s."""
    return httpx.create_ssl_context()


class HttpTransport:
    """A connection pool of one event loop."""

    def __init__(self, timeouts: Timeouts, transport: httpx.AsyncBaseTransport | None) -> None:
        for name in WIRE_LOGS:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._timeouts = timeouts
        # Requests to this machine never use a proxy from the environment.
        direct: dict[str, httpx.AsyncBaseTransport | None] = dict.fromkeys(LOOPBACK)
        self._client = httpx.AsyncClient(
            http2=True,
            verify=_authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
            headers={"Accept-Encoding": "identity"},
            cookies=NoCookies(),
            event_hooks={"response": [_forget_location]},
            timeout=timeouts.of_request(),
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
            transport=transport,
            mounts=direct,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def send(
        self, outgoing: Outgoing, secret: Secret, within_s: float
    ) -> ProviderReply | NoResponse:
        """Return the complete response, or how the request was lost.

        Waits at most `within_s`. A cancelled request is closed.
        """
        teacher = outgoing.teacher
        if self._client.is_closed:
            return NoResponse(ProviderServerError(teacher.name, "the client is closed"), sent=False)
        if within_s <= 0:
            return NoResponse(
                ProviderTimeout(teacher.name, "no time was left to send it"), sent=False
            )
        try:
            async with asyncio.timeout(within_s):
                response, raw = await self._exchange(outgoing, secret)
        except (httpx.HTTPError, httpx.StreamError, OSError, RefusedReply) as fault:
            return self._lost(teacher.name, fault)
        headers = {name.lower(): secret.hide(text) for name, text in response.headers.items()}
        raw = secret.hide_bytes(raw)
        return ProviderReply(response.status_code, headers, raw, outgoing.request_id, secret)

    async def _exchange(self, outgoing: Outgoing, secret: Secret) -> tuple[httpx.Response, bytes]:
        async with self._client.stream(
            "GET" if outgoing.content is None else "POST",
            outgoing.teacher.url(outgoing.path),
            content=outgoing.content,
            headers=outgoing.headers(secret),
        ) as response:
            return response, await bounded_body(response)

    def _lost(self, teacher: str, fault: Exception) -> NoResponse:
        """Return the error of a lost request, without its text, which may hold headers."""
        error: ProviderError
        sent, name = True, type(fault).__name__
        match fault:
            case RefusedReply():
                error = ProviderMalformed(teacher, str(fault))
            case TimeoutError():
                error = ProviderTimeout(teacher, f"no answer within {self._timeouts.total_s} s")
            case httpx.ConnectTimeout():
                error, sent = ProviderTimeout(teacher, f"no connection ({name})"), False
            case httpx.TimeoutException():
                error = ProviderTimeout(teacher, f"it fell silent ({name})")
            case httpx.ConnectError():
                error, sent = ProviderServerError(teacher, f"no connection ({name})"), False
            case _:
                error = ProviderServerError(teacher, f"the connection broke ({name})")
        return NoResponse(error, sent)


async def _forget_location(response: httpx.Response) -> None:
    """Drop where a redirect leads: it is not followed, and httpx fails on what is no address."""
    response.headers.pop("location", None)
