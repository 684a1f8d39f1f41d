"""What islands tell each other in a round by torchft, and when its average counts; no torchft here.

A header is exchanged before the average and another after it, so that an average counts only where
every island started from the same common weights and got the same mean.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from composer_mesh.plugins.islands.store.port import StoreUnfit

HEADER = struct.Struct("<iBB32s32s")
NOTHING = b"\0" * 32


class OtherLayout(StoreUnfit):
    """The other islands train another model, or by other rules."""

    def __str__(self) -> str:
        return (
            "the islands at this lighthouse have other weights, fragments, quantization, outer "
            "optimizer or world_size: give all islands one config, or this one another lighthouse"
        )


class NoAverage(Exception):
    """A round whose average may not be used, and why."""


class StartedFromOtherWeights(NoAverage):
    """This island started from other common weights than the first one, so it has to heal."""


class RecoveredWithoutAverage(NoAverage):
    """This island got the common weights but no average: what it offered starts from others."""


@dataclass(frozen=True)
class Header:
    """What an island says of itself in a round.

    An island that heals does not take part, and one whose values are not finite gives nothing.
    `base` is the checksum of the common weights that its contribution starts from.
    """

    rank: int
    takes_part: bool
    gives: bool
    base: bytes
    layout: bytes

    def packed(self) -> bytes:
        """Return the header as bytes of a fixed length."""
        return HEADER.pack(self.rank, self.takes_part, self.gives, self.base, self.layout)

    @classmethod
    def unpacked(cls, data: bytes) -> "Header":
        """Return the header of such bytes."""
        rank, takes_part, gives, base, layout = HEADER.unpack(data)
        return cls(rank, bool(takes_part), bool(gives), base, layout)


def contributors(
    own: Header, all_headers: Sequence[Header], quorum: int, world_size: int
) -> list[int]:
    """Return the places of the headers whose contributions are averaged.

    Raises `NoAverage` where they may not be, and `OtherLayout` where the islands differ.
    """
    part = [one for one in all_headers if one.takes_part]
    if any(one.layout != own.layout for one in part):
        raise OtherLayout()
    ranks = [one.rank for one in part]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        raise NoAverage(
            f"islands {sorted(ranks)} take part but world_size is {world_size}: stop the island "
            "that runs twice"
        )
    first = min(part, key=lambda one: one.rank, default=own)
    if any(one.base != first.base for one in part):
        others = sorted(one.rank for one in part if one.base != first.base)
        why = f"islands {others} have other common weights than island {first.rank}, and heal"
        if own.takes_part and own.base != first.base:
            raise StartedFromOtherWeights(why)
        raise NoAverage(why)
    found = [place for place, one in enumerate(all_headers) if one.takes_part and one.gives]
    if len(found) < quorum:
        raise NoAverage(f"{len(found)} islands have contributed but the quorum is {quorum}")
    return found


def check_same_mean(digests: Sequence[bytes]) -> None:
    """Raise `NoAverage` unless all islands have computed the same mean."""
    if len(set(digests)) != 1:
        raise NoAverage(f"{len(set(digests))} different means were computed, so none is used")
