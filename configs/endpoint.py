"""Who answers over the OpenAI chat protocol: the run itself, or any compatible URL.

Holds no credentials: `api_key_env` names an environment variable, never its value.
"""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import Section

ADDRESS = ("base_url", "model", "api_key_env")


class ChatEndpoint(Section):
    """A model that can be asked; more keys come from who asks it."""

    kind: Literal["builtin", "openai"]
    """"builtin": rules that the run serves itself; "openai": any compatible URL."""

    base_url: str | None = None
    """Root of an openai API, up to and including /v1."""

    model: str | None = None
    """Model name that is sent to it."""

    api_key_env: str | None = None
    """Environment variable that holds its key; not set means no key is sent."""

    @model_validator(mode="after")
    def _address_fits_the_kind(self) -> Self:
        if self.kind == "builtin":
            self._refuse(ADDRESS)
            return self
        for key in ("base_url", "model"):
            if not getattr(self, key):
                raise ValueError(
                    f"{key} is not set but kind is 'openai', which needs base_url and model: "
                    f"set {key}"
                )
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {self.base_url!r} but must begin with http:// or https://: "
                "write the whole address"
            )
        return self

    def _refuse(self, keys: tuple[str, ...]) -> None:
        """Raise for keys that this kind does not read."""
        for key in keys:
            if (value := getattr(self, key)) is not None:
                raise ValueError(
                    f"{key} is {value!r} but kind is {self.kind!r}, which does not read it: "
                    f"remove {key} or change kind"
                )
