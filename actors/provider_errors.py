"""Why a provider did not answer: an exception class per kind of failure, and whose status it is.

    ProviderError
      ProviderAuthError      401, 403, no usable key      final
      ProviderPaymentError   402                          final, or retried at its Retry-After
      ProviderRateError      429                          retried
      ProviderServerError    5xx, connection lost         retried
      ProviderTimeout        408, no bytes, no answer     retried while time is left
      ProviderRequestError   any other status             final
      ProviderMalformed      an answer that is none       final

Their texts never hold a key. Nothing here sends or waits.
"""

from typing import ClassVar

from composer_mesh.rollouts.pairs import FailureKind


class ProviderError(Exception):
    """A teacher's provider failed. `retry_after_s` is its own wish, where it gave one."""

    kind: ClassVar[FailureKind]
    repair: ClassVar[str]
    transient: ClassVar[bool] = False

    def __init__(self, teacher: str, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(teacher, text, retry_after_s)
        self.teacher, self.text, self.retry_after_s = teacher, text, retry_after_s

    def __str__(self) -> str:
        return f"teacher {self.teacher!r}: {self.text}: {self.repair}"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.transient


class ProviderAuthError(ProviderError):
    kind = FailureKind.AUTH
    repair = "check the key in the environment variable that its api_key_env names"


class ProviderPaymentError(ProviderError):
    kind = FailureKind.PAYMENT
    repair = "add credit at the provider, or remove this teacher"

    @property
    def retryable(self) -> bool:
        return self.retry_after_s is not None


class ProviderRateError(ProviderError):
    kind = FailureKind.RATE
    repair = "lower replay.states_per_step or replay.actors, or raise the provider's limit"
    transient = True


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


class ProviderMalformed(ProviderError):
    kind = FailureKind.MALFORMED
    repair = "check that its base_url speaks the OpenAI chat protocol"


_BY_STATUS: dict[int, type[ProviderError]] = {
    401: ProviderAuthError,
    402: ProviderPaymentError,
    403: ProviderAuthError,
    408: ProviderTimeout,
    429: ProviderRateError,
}


def error_class(status: int) -> type[ProviderError]:
    """The class of failure that an HTTP status, or an error body's code, stands for."""
    fallback = ProviderServerError if status >= 500 else ProviderRequestError
    return _BY_STATUS.get(status, fallback)
