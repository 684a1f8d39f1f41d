"""Errors of providers: an exception class per kind of failure, and its handling.

    class                    when                                 retried          breaker  charged
    ProviderAuthError        401, 403, no usable key              no               fails    nothing
    ProviderPaymentError     402                                  if it says when  fails    nothing
    ProviderRateError        429                                  yes              busy     nothing
      ProviderCrowded        its own limits left no room for it   no               -        nothing
    ProviderModerationError  403 or 400 that says so              no               answers  nothing
                             an answer ended by a content filter  no               answers  all
    ProviderServerError      5xx, connection lost                 yes              fails    all
                             no connection (refused, TLS, name)   yes              fails    nothing
    ProviderTimeout          408, no bytes, no answer             yes              fails    all
                             no connection in time                yes              fails    nothing
    ProviderRequestError     any other status                     no               answers  nothing
    ProviderMalformed        an unparsable or too long answer     no               fails    all
    ProviderBudgetError      a ceiling, unknown or wrong prices   no               -        nothing
    ProviderSuspended        its breaker is open                  no               -        nothing

*retried*: within `attempts` and the remaining time, after full jitter; a Retry-After is the minimum
wait, and one beyond the remaining time ends the query at once. *breaker*: `fails` counts towards
opening it, `answers` shows that the provider works, `busy` is neither, `-` was not sent. *charged*:
the cost of an attempt whose body reports neither a cost nor, with known prices, its tokens; `all`
is its full reservation, because it is unknown whether an answer was generated. An error inside a
200 came after generation began: its class is that of its code, and it is charged like a 5xx. A
cancelled query is charged in full, and no breaker counts it.

Error messages never contain an API key.
"""

from enum import StrEnum
from typing import ClassVar

from composer_mesh.rollouts.pairs import FailureKind


class BreakerVerdict(StrEnum):
    """State of the provider, as the end of a request shows it."""

    ANSWERED = "answered"
    """The provider works, even if it refused this request."""

    BUSY = "busy"
    """The provider is at its limit: neither a failure nor the end of a row of failures."""

    FAILED = "failed"

    NOTHING = "nothing"
    """The request was not sent, or its result was not awaited."""


class ProviderError(Exception):
    """A teacher's provider failed; `retry_after_s` is its Retry-After, if it sent one.

    `charged` is the cost of the query with all its attempts, in nano-dollars. `status` is that of
    the HTTP response that refused it, None for any other failure.
    """

    failure_class: ClassVar[str] = "provider"
    kind: ClassVar[FailureKind]
    repair: ClassVar[str]
    transient: ClassVar[bool] = False
    verdict: ClassVar[BreakerVerdict] = BreakerVerdict.FAILED

    def __init__(
        self,
        teacher: str,
        text: str,
        retry_after_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(teacher, text, retry_after_s, status)
        self.teacher, self.text, self.retry_after_s = teacher, text, retry_after_s
        self.status, self.charged = status, 0

    def __str__(self) -> str:
        return self.for_role("teacher", "replay")

    def for_role(self, role: str, section: str, budget: str = "") -> str:
        """Return the error of a model with a role, which is configured in a section.

        `budget` is the repair for a spent budget, where its keys are not those of [replay].
        """
        own = budget if self.kind is FailureKind.BUDGET else ""
        repair = own or self.repair.replace("replay.", f"{section}.").replace("teacher", role)
        return f"{role} {self.teacher!r}: {self.text}: {repair}"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.transient


class ProviderAuthError(ProviderError):
    kind = FailureKind.AUTH
    repair = "check the key in the variable or file that its api_key_env or api_key_file names"


class ProviderPaymentError(ProviderError):
    kind = FailureKind.PAYMENT
    repair = "add credit at the provider, or remove this teacher"

    @property
    def retryable(self) -> bool:
        return self.retry_after_s is not None


class ProviderRateError(ProviderError):
    kind = FailureKind.RATE
    repair = "lower its concurrency or requests_per_minute, or raise the provider's limit"
    transient = True
    verdict = BreakerVerdict.BUSY


class ProviderCrowded(ProviderRateError):
    """Not sent: the teacher's own limits left no capacity for the query in time."""

    repair = "raise its concurrency or requests_per_minute, or query fewer states at once"
    transient = False
    verdict = BreakerVerdict.NOTHING


class ProviderModerationError(ProviderError):
    kind = FailureKind.MODERATION
    repair = "other queries are not affected; if it refuses many, choose another teacher"
    verdict = BreakerVerdict.ANSWERED


class ProviderServerError(ProviderError):
    kind = FailureKind.SERVER
    repair = "check that its base_url answers, or try again later"
    transient = True


class ProviderTimeout(ProviderError):
    kind = FailureKind.TIMEOUT
    repair = "raise replay.timeout_s, or choose a faster teacher"
    transient = True


class ProviderRequestError(ProviderError):
    kind = FailureKind.REQUEST
    repair = "check its base_url and model, and that the model takes tools"
    verdict = BreakerVerdict.ANSWERED


class ProviderMalformed(ProviderError):
    kind = FailureKind.MALFORMED
    repair = "check that its base_url speaks the OpenAI chat protocol"


class ProviderBudgetError(ProviderError):
    """Not sent: the query might exceed a budget, or its provider did not keep to its prices."""

    kind = FailureKind.BUDGET
    repair = "raise replay.budget.usd or the max_usd of this teacher, or set its prices"
    verdict = BreakerVerdict.NOTHING


class ProviderSuspended(ProviderError):
    """Not sent: the teacher failed too often in a row and is suspended for a while."""

    kind = FailureKind.SUSPENDED
    repair = "correct the cause of its last failure; the breaker tries it again automatically"
    verdict = BreakerVerdict.NOTHING


_BY_STATUS: dict[int, type[ProviderError]] = {
    401: ProviderAuthError,
    402: ProviderPaymentError,
    403: ProviderAuthError,
    408: ProviderTimeout,
    429: ProviderRateError,
}


def error_class(status: int) -> type[ProviderError]:
    """Return the failure class of an HTTP status, or of an error body's code."""
    fallback = ProviderServerError if status >= 500 else ProviderRequestError
    return _BY_STATUS.get(status, fallback)
