"""What `data.options` says of an OpenEnv environment."""

import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from composer_mesh.configs.validation import first_error, validated
from composer_mesh.tasks.errors import UnusableTask

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Name = Annotated[str, Field(min_length=1, max_length=100)]


class OpenEnvOptions(BaseModel):
    """Address of an environment, and how its actions and rewards are read."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    url: Annotated[str, Field(max_length=2000)]
    """Address of the server: http://HOST:PORT or https://HOST, and a path if it has one."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")] | None = None
    """Name of the task in traces and metrics, by default "openenv"; two environments of a mixture
    need different ones."""

    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable whose value is sent as a bearer token."""

    action: Literal["tools", "schema", "text"] | None = None
    """"tools": the tools that the environment lists; "schema": one tool, `act`, with the fields of
    the action; "text": the agent's text is the action's only text field. Without it "tools" where
    the environment takes calls of tools, else "schema"."""

    reward: Literal["terminal", "summed"] = "terminal"
    """"terminal": the reward that comes with `done`, and 0 for an episode that was not finished;
    "summed": the sum of all steps."""

    success_at: float = 1.0
    """Reward from which on an episode counts as a success."""

    most_reward: Annotated[float, Field(gt=0, le=1e12)] = 1e6
    """Largest absolute reward of a step; a larger one fails the attempt."""

    step_errors: Literal["fail", "tell"] = "fail"
    """An exception in the environment's step: "fail" ends the attempt, without a reward; "tell"
    is an error of the agent, which reads the message."""

    prompt: Annotated[str, Field(max_length=100_000)] = ""
    """Text before the first observation."""

    observation: Name | None = None
    """The field of observations that the agent reads; without it the only text, or all as JSON."""

    env: Name | None = None
    """Name of the environment in the Task API; by default the one that the server lists."""

    train_split: Name | None = None
    """Split of the training episodes; by default the first of type "train"."""

    heldout_split: Name | None = None
    """Split of the held-out episodes; by default the first of another type."""

    reset: dict[str, Any] = Field(default_factory=dict, max_length=100)
    """Further arguments of each reset."""

    hint_templates: dict[Name, Annotated[str, Field(max_length=2000)]] = Field(
        default_factory=dict, max_length=100
    )
    """Hints by error kind or template key of the environment."""

    connect_s: Seconds = 10.0
    """Seconds to connect."""

    reset_s: Seconds | None = None
    """Seconds that a reset may take; by default 0.4 of environment.call_s."""

    step_s: Seconds | None = None
    """Seconds that a step may take; by default 0.9 of environment.call_s."""

    ping_s: Seconds | None = None
    """Seconds between pings of the connection; none are sent without it."""

    frame_mb: Annotated[float, Field(gt=0, le=100)] = 4.0
    """Megabytes of the longest frame; a longer one fails the attempt."""

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it must begin with http:// or https:// and name a host")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "it must have no user, password, query or fragment: name a token by token_env"
            )
        return url.rstrip("/")

    @model_validator(mode="after")
    def _a_token_travels_encrypted(self) -> Self:
        if self.token_env and not self.url.startswith("https://") and not self.is_loopback:
            raise ValueError(
                f"a token would travel unencrypted to {self.url}: use https://, or a loopback "
                "address such as a tunnel's"
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def socket_url(self) -> str:
        """Address of the server's WebSockets, without a path of their own."""
        return "ws" + self.url.removeprefix("http")

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest frame or body."""
        return int(self.frame_mb * 2**20)

    def headers(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the headers of a request; raises UnusableTask where the token is not set."""
        if self.token_env is None:
            return {}
        token = environ.get(self.token_env, "")
        if not token or not token.isascii() or not token.isprintable():
            raise UnusableTask(
                f"data.options.token_env is {self.token_env!r}, but that variable is not set here, "
                "or is not a line of printable ASCII: export the token in it"
            )
        return {"Authorization": f"Bearer {token}"}


def read_options(options: Mapping[str, Any]) -> OpenEnvOptions:
    """Return validated options; raises UnusableTask with the key and the bound."""
    try:
        return validated(OpenEnvOptions, dict(options))
    except ValidationError as error:
        first = first_error(error)
        key = ".".join(["data.options", *map(str, first["loc"])])
        close = ", ".join(OpenEnvOptions.model_fields)
        advice = f": use one of {close}" if first["type"] == "extra_forbidden" else ""
        raise UnusableTask(f"{key}: {first['msg']}{advice}") from None
