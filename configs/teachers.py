"""One external teacher: its endpoint, request limits and prices.

`budget` limits the cost of all teachers together.

Cost limits of teachers in dollars, and the policy for unknown prices.

Circuit breaker for model endpoints that keep failing.

OpenAI-compatible chat endpoints: served by the run itself, or any URL.

Contains no credentials: `api_key_env` and `api_key_file` refer to keys.

Judges: language models that reward functions ask, within one dollar ceiling for all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    Concurrent,
    Count,
    Dollars,
    DollarsAboveZero,
    FilePath,
    Processes,
    Seconds,
    Section,
    Share,
    Temperature,
    Tokens,
    repeated,
)

ADDRESS = ("base_url", "model", "api_key_env", "api_key_file")
OPENROUTER_URL = "https://openrouter.ai/api/v1"
OPENROUTER_KEY = "OPENROUTER_API_KEY"


class ChatEndpoint(Section):
    """A chat endpoint; subclasses add the keys of its client."""

    kind: Literal["builtin", "openai", "openrouter"]
    """"builtin": rules that the run serves itself; "openai": any compatible URL; "openrouter"."""

    base_url: str | None = None
    """Root URL of the API, up to and including /v1; openrouter has its own."""

    model: str | None = None
    """Model name in requests."""

    api_key_env: str | None = None
    """Environment variable that holds the API key; without it and a file no key is sent."""

    api_key_file: FilePath | None = None
    """File that contains only the API key, instead of an environment variable."""

    @property
    def url(self) -> str | None:
        """URL of the endpoint; None if the run serves it."""
        return self.base_url or (OPENROUTER_URL if self.kind == "openrouter" else None)

    @property
    def key_variable(self) -> str | None:
        """Environment variable of the API key; openrouter has a default one."""
        if self.kind == "openrouter" and self.api_key_file is None:
            return self.api_key_env or OPENROUTER_KEY
        return self.api_key_env

    def _problems(self) -> Iterator[str]:
        if self.kind == "builtin":
            yield from self._unread(ADDRESS)
            return
        for key, value in (("base_url", self.url), ("model", self.model)):
            if not value:
                yield (
                    f"{key} is not set but kind is {self.kind!r}, which needs base_url and model: "
                    f"set {key}"
                )
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            yield (
                f"base_url is {self.base_url!r} but must begin with http:// or https://: "
                "write the whole address"
            )
        if self.api_key_env and self.api_key_file:
            yield (
                f"api_key_env is {self.api_key_env!r} and api_key_file is "
                f"{str(self.api_key_file)!r} but a key comes from one place: remove one of them"
            )

    def _unread(self, keys: tuple[str, ...]) -> Iterator[str]:
        """Yield those of the keys that are set, which this kind does not use."""
        for key in keys:
            if (value := getattr(self, key)) is not None:
                yield (
                    f"{key} is {value!r} but kind is {self.kind!r}, which does not read it: "
                    f"remove {key} or change kind"
                )


class BudgetConfig(Section):
    """A hard spending limit: each request's highest possible cost is reserved before it is sent."""

    usd: Dollars = 0.0
    """Maximum total cost of all teachers in the run; 0 allows free teachers only."""

    usd_per_day: Dollars | None = None
    """Maximum cost per day (UTC) of all runs that share `ledger`."""

    unknown_prices: Literal["refuse", "allow"] = "refuse"
    """Whether to query teachers with unknown prices."""

    assumed_usd: DollarsAboveZero = 0.05
    """Dollars charged for a request of unknown price, if those are allowed."""

    ledger: FilePath | None = None
    """SQLite file of all reservations and charges; in the run directory when not set."""

    def _problems(self) -> Iterator[str]:
        if self.usd_per_day is not None and self.ledger is None:
            yield (
                f"usd_per_day is {self.usd_per_day} but ledger is not set, so other runs of the "
                "day would not be seen: name one file that all of them share"
            )


class BreakerConfig(Section):
    """Circuit breaker for a model that keeps failing."""

    failures: Count = 5
    """Consecutive failed requests after which the model is suspended."""

    rest_s: Seconds = 30.0
    """Seconds of suspension until one request tests the model again."""


PRICES = ("prompt_usd_per_million", "completion_usd_per_million", "usd_per_request")


class OpenRouterConfig(Section):
    """Selection of OpenRouter's providers; keys that are not set are not sent."""

    require_parameters: bool = True
    """Only providers that support every parameter; others drop tools and seeds silently."""

    enforce_distillable_text: bool | None = None
    """Only models whose terms allow training on their text."""

    data_collection: Literal["allow", "deny"] | None = None
    """Whether providers may store the data that they receive."""

    zdr: bool | None = None
    """Only providers with zero data retention."""

    max_prompt_usd_per_million: DollarsAboveZero | None = None
    """Maximum price of a million prompt tokens."""

    max_completion_usd_per_million: DollarsAboveZero | None = None
    """Maximum price of a million answer tokens."""


class TeacherConfig(ChatEndpoint):
    """One external teacher that speaks the OpenAI chat protocol."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Name of this teacher in reports; unique in the run."""

    error_rate: Share | None = None
    """Share of a builtin teacher's actions that are deliberately wrong; 0 when not set."""

    max_tokens: Tokens = 1024
    """Maximum tokens of an answer: sent with each request, and the basis of its reservation."""

    temperature: Temperature | None = None
    """Sampling temperature; the provider's default when not set."""

    concurrency: Concurrent = 16
    """Maximum concurrent requests, over all teacher-replay actors."""

    requests_per_minute: Count | None = None
    """Maximum requests per minute, over all teacher-replay actors; unlimited when not set."""

    prompt_usd_per_million: Dollars | None = None
    """Price of a million prompt tokens; openrouter's is read from its list of models."""

    completion_usd_per_million: Dollars | None = None
    """Price of a million answer tokens."""

    usd_per_request: Dollars | None = None
    """Price of a request in addition to its tokens; 0 when not set."""

    max_usd: Dollars | None = None
    """Maximum cost of this teacher in the run, within the limit of the complete run."""

    openrouter: OpenRouterConfig | None = None
    """Selection of OpenRouter's providers."""

    @property
    def has_prices(self) -> bool:
        """Whether token prices are configured; builtin teachers are free."""
        prices = (self.prompt_usd_per_million, self.completion_usd_per_million)
        return self.kind == "builtin" or None not in prices

    @property
    def costs(self) -> bool:
        """Whether a configured price is above 0."""
        return any(getattr(self, key) for key in PRICES)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        paid = (*PRICES, "max_usd", "temperature", "requests_per_minute")
        yield from self._unread(paid if self.kind == "builtin" else ("error_rate",))
        if self.kind != "openrouter":
            yield from self._unread(("openrouter",))
        prompt, completion = self.prompt_usd_per_million, self.completion_usd_per_million
        if (prompt is None) != (completion is None):
            missing = PRICES[0] if prompt is None else PRICES[1]
            yield f"{missing} is not set but the other price is: set both, 0 where it is free"


def name_problems(models: Sequence[TeacherConfig], key: str) -> Iterator[str]:
    """Yield the names that several models of one list have."""
    names = [one.name for one in models]
    for name in repeated(names):
        yield (
            f"{key} has {names.count(name)} entries named {name!r} but names must be "
            "unique, because reports are by name: rename all but one"
        )


def cost_problems(
    models: Sequence[TeacherConfig], budget: BudgetConfig, role: str, key: str
) -> Iterator[str]:
    """Yield the models whose cost has no bound, or that could never be queried."""
    for one in models:
        known = one.has_prices or one.kind == "openrouter"
        if not known and budget.unknown_prices == "refuse":
            yield (
                f"{role} {one.name!r} has no price, so no ceiling could hold: set its "
                "prompt_usd_per_million and completion_usd_per_million (0 where it is free), "
                f"or set {key}.unknown_prices to 'allow'"
            )
        if (one.costs or not known) and budget.usd == 0:
            yield (
                f"budget.usd is 0 but {role} {one.name!r} costs money, so it could never "
                f"be queried: set {key}.usd to what the run may cost"
            )


MOST_JUDGES = 100


class JudgeConfig(TeacherConfig):
    """One judge: a model that speaks the OpenAI chat protocol."""

    kind: Literal["openai", "openrouter"] = "openai"
    """"openai": any compatible URL; "openrouter"."""


class JudgesConfig(Section):
    """Models that reward functions query with `self.judge(NAME)`."""

    actors: Processes = 1
    """Number of judge actors that query in parallel."""

    timeout_s: Seconds = 60.0
    """Seconds until a question counts as failed, including all its retries and waits."""

    connect_timeout_s: Seconds = 5.0
    """Seconds to establish a connection."""

    read_timeout_s: Seconds | None = None
    """Seconds without a received byte until a request fails; timeout_s when not set."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Maximum number of times to send one question, while failures are transient."""

    answers: Annotated[int, Field(ge=1, le=10)] = 3
    """Maximum number of answers to one question until one has the required form."""

    when_spent: Literal["stop", "leave_out"] = "stop"
    """What happens once budget.usd allows no further question.

    "stop": the run ends with a checkpoint, and can be resumed with more; "leave_out": rewards that
    ask judges are left out, for whole groups."""

    cache: FilePath | None = None
    """SQLite file of paid answers, shared by runs; that of the teachers when not set."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """Cost limits of all judges together."""

    breaker: BreakerConfig = Field(default_factory=BreakerConfig)
    """Circuit breaker of the judges."""

    models: Annotated[tuple[JudgeConfig, ...], Field(strict=False, max_length=MOST_JUDGES)] = ()
    """The judges by name."""

    @property
    def on(self) -> bool:
        """Whether the run has judges."""
        return bool(self.models)

    @property
    def patience_s(self) -> float:
        """Seconds that a reward may wait for one well-formed answer; 0 without judges."""
        return self.timeout_s * self.answers if self.on else 0.0

    def _problems(self) -> Iterator[str]:
        yield from name_problems(self.models, "models")
        yield from cost_problems(self.models, self.budget, "judge", "judges.budget")
