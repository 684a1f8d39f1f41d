"""One external teacher: where it is, what it may be asked, what it costs.

What all teachers together may cost is `budget`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section, Share
from composer_mesh.configs.endpoint import ChatEndpoint

PRICES = ("prompt_usd_per_million", "completion_usd_per_million", "usd_per_request")


class OpenRouterConfig(Section):
    """Which of OpenRouter's providers may answer; a key that is not set is not sent."""

    require_parameters: bool = True
    """Only providers that honour every parameter; others drop tools and seeds silently."""

    enforce_distillable_text: bool | None = None
    """Only models whose terms allow training on their text."""

    data_collection: Literal["allow", "deny"] | None = None
    """Whether providers may keep what they are sent."""

    zdr: bool | None = None
    """Only providers that retain nothing."""

    max_prompt_usd_per_million: Positive | None = None
    """Dearest prompt tokens that a provider may charge."""

    max_completion_usd_per_million: Positive | None = None
    """Dearest answer tokens that a provider may charge."""


class TeacherConfig(ChatEndpoint):
    """One external teacher that speaks the OpenAI chat protocol."""

    name: Annotated[str, Field(min_length=1)]
    """How reports call this teacher; unique in the run."""

    error_rate: Share | None = None
    """Share of a builtin teacher's actions that are wrong on purpose; 0 when not set."""

    max_tokens: Count = 1024
    """Longest answer in tokens: sent with each request, and what a reservation is made for."""

    temperature: NotNegative | None = None
    """Sampling temperature; the provider's own when not set."""

    concurrency: Count = 16
    """Requests under way at once, over all teacher-replay actors."""

    requests_per_minute: Count | None = None
    """Requests sent in a minute, over all teacher-replay actors; without bound when not set."""

    prompt_usd_per_million: NotNegative | None = None
    """Price of a million prompt tokens; openrouter's is read from its list of models."""

    completion_usd_per_million: NotNegative | None = None
    """Price of a million answer tokens."""

    usd_per_request: NotNegative | None = None
    """Price of a request besides its tokens; 0 when not set."""

    max_usd: NotNegative | None = None
    """Ceiling of this teacher's cost in the run, below that of the whole run."""

    openrouter: OpenRouterConfig | None = None
    """Which of OpenRouter's providers may answer."""

    @property
    def has_prices(self) -> bool:
        """Whether the config says what tokens cost; builtin teachers are free."""
        prices = (self.prompt_usd_per_million, self.completion_usd_per_million)
        return self.kind == "builtin" or None not in prices

    @property
    def costs(self) -> bool:
        """Whether the config names a price above 0."""
        return any(getattr(self, key) for key in PRICES)

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        if self.kind != "builtin":
            self._refuse(("error_rate",))
        else:
            self._refuse((*PRICES, "max_usd", "temperature", "requests_per_minute"))
        if self.kind != "openrouter":
            self._refuse(("openrouter",))
        return self

    @model_validator(mode="after")
    def _prices_come_together(self) -> Self:
        prompt, completion = self.prompt_usd_per_million, self.completion_usd_per_million
        if (prompt is None) != (completion is None):
            missing = PRICES[0] if prompt is None else PRICES[1]
            raise ValueError(
                f"{missing} is not set but the other price is: set both, 0 where it is free"
            )
        return self
