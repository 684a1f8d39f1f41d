"""The experts that a mixture's routers chose for the tokens of a rollout, as the bytes of an array.

The trainer computes with the same ones (router replay), so that it differs from the engine by
rounding alone. 48 layers of 8 experts are 384 bytes a token.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from composer_mesh.rollouts.message_pickling import pickled_by_position


def _decoded(contents: Any) -> Any:
    return b64decode(contents, validate=True) if isinstance(contents, str) else contents


def _encoded(contents: bytes) -> str:
    return b64encode(contents).decode("ascii")


Contents = Annotated[
    bytes, BeforeValidator(_decoded), PlainSerializer(_encoded, return_type=str, when_used="json")
]
"""Bytes, which are base64 in JSON."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Numbers of experts [positions, layers, per_token], each of `width` bytes, 1 or 2.

    `layers` are those with experts, in order; `per_token` is how many experts compute a token.
    """

    layers: int
    per_token: int
    width: int
    contents: Contents

    def __post_init__(self) -> None:
        if min(self.layers, self.per_token) < 1 or self.width not in (1, 2):
            raise ValueError(
                f"choices of {self.layers} layers and {self.per_token} experts a token, of "
                f"{self.width} bytes each: layers and experts are at least 1, bytes 1 or 2"
            )
        if len(self.contents) % self.position_bytes:
            raise ValueError(
                f"choices of {len(self.contents)} bytes are of no whole number of positions, of "
                f"{self.position_bytes} bytes each"
            )

    @property
    def position_bytes(self) -> int:
        """Bytes of one position."""
        return self.layers * self.per_token * self.width

    @property
    def positions(self) -> int:
        """Number of positions that experts were chosen for."""
        return len(self.contents) // self.position_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts of a token, and bytes of a number."""
        return self.layers, self.per_token, self.width


def joined(parts: Sequence[ExpertChoices]) -> ExpertChoices:
    """Return the choices of parts that follow each other; raises ValueError for unlike ones."""
    first = parts[0]
    if unlike := next((one for one in parts if one.shape != first.shape), None):
        raise ValueError(
            f"choices of {first.shape} (layers, experts, bytes) are followed by {unlike.shape}: "
            "those of one rollout are of one model"
        )
    return ExpertChoices(*first.shape, b"".join(one.contents for one in parts))
