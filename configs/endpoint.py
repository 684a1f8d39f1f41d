"""OpenAI-compatible chat endpoints: served by the run itself, or any URL.

Contains no credentials: `api_key_env` and `api_key_file` refer to keys.
"""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import FilePath, Section

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

    @model_validator(mode="after")
    def _address_fits_the_kind(self) -> Self:
        if self.kind == "builtin":
            self._refuse(ADDRESS)
            return self
        for key, value in (("base_url", self.url), ("model", self.model)):
            if not value:
                raise ValueError(
                    f"{key} is not set but kind is {self.kind!r}, which needs base_url and model: "
                    f"set {key}"
                )
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {self.base_url!r} but must begin with http:// or https://: "
                "write the whole address"
            )
        if self.api_key_env and self.api_key_file:
            raise ValueError(
                f"api_key_env is {self.api_key_env!r} and api_key_file is "
                f"{str(self.api_key_file)!r} but a key comes from one place: remove one of them"
            )
        return self

    def _refuse(self, keys: tuple[str, ...]) -> None:
        """Raise ValueError for keys that this kind does not use."""
        for key in keys:
            if (value := getattr(self, key)) is not None:
                raise ValueError(
                    f"{key} is {value!r} but kind is {self.kind!r}, which does not read it: "
                    f"remove {key} or change kind"
                )
