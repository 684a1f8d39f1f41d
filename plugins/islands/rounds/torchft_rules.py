"""What islands by torchft need and tell each other, and when their average counts; no torchft here.

The package and a lighthouse are checked before anything is started. A header is exchanged before
the average and another after it, so that an average counts only where every island started from
the same common weights and got the same mean.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.configs.worded import Worded
from composer_mesh.plugins.islands.store.opening import StoreUnfit

LOOK_S = 10.0


class TorchftMissing(Worded, StoreUnfit):
    """islands.lighthouse is set, but torchft is not installed."""

    message = (
        "islands.lighthouse needs the package torchft, which is not installed: pip install "
        "'composer-mesh[torchft]', or give islands.store"
    )


class LighthouseUnfit(Worded, StoreUnfit):
    """A lighthouse or an address cannot be used: which, and why."""

    message = "{0}: {1}: start torchft_lighthouse where all islands reach it, and give its address"


def check_torchft(config: IslandsConfig) -> None:
    """Raise `TorchftMissing` for islands that need it; imports nothing."""
    if config.lighthouse is not None and find_spec("torchft") is None:
        raise TorchftMissing()


def check_lighthouse(address: str) -> None:
    """Raise `LighthouseUnfit` unless a lighthouse answers at an address."""
    import httpx

    try:
        page = httpx.get(address, timeout=LOOK_S, trust_env=False).text
    except httpx.HTTPError as error:
        raise LighthouseUnfit(address, f"does not answer ({error})") from error
    if "torchft" not in page:
        raise LighthouseUnfit(address, "answers, but is not a lighthouse of torchft")


HEADER = struct.Struct("<iBB32s32s")


class OtherLayout(Worded, StoreUnfit):
    """The other islands train another model, or by other rules."""

    message = (
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
