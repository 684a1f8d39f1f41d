"""The section `[islands]`: DiLoCo between runs that meet in an object store or by torchft."""

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import Discriminator, Field, Tag

from composer_mesh.configs.base import (
    Count,
    CountOrZero,
    Positive,
    Processes,
    Seconds,
    Section,
    Share,
    by_type,
)

STORES = ("file", "s3", "gs", "az")
ONLY_STORE = ("max_staleness", "absent_after", "rounds_kept")
"""Keys that islands with a lighthouse have no use for."""
LOOPBACK = "127.0.0.1"
THIS_MACHINE = (LOOPBACK, "localhost")
Decay = Annotated[float, Field(ge=0, lt=1)]


class OuterSgd(Section):
    """SGD on the mean outer gradient, with Nesterov momentum as in DiLoCo."""

    type: Literal["sgd"] = "sgd"
    """Type of the outer optimizer."""

    lr: Positive = 0.7
    """Outer learning rate; 1 with momentum 0 averages the islands' weights."""

    momentum: Decay = 0.9
    """Decay of the momentum; 0 turns it off."""

    nesterov: bool = True
    """Whether the momentum looks ahead."""


class OuterAdam(Section):
    """Adam on the mean outer gradient."""

    type: Literal["adam"]
    """Type of the outer optimizer."""

    lr: Positive = 0.001
    """Outer learning rate."""

    beta1: Decay = 0.9
    """Decay of the gradient mean."""

    beta2: Decay = 0.95
    """Decay of the gradient's second moment."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""


OuterConfig = Annotated[
    Annotated[OuterSgd, Tag("sgd")] | Annotated[OuterAdam, Tag("adam")],
    Discriminator(by_type("sgd")),
]


class IslandsConfig(Section):
    """Averages with other runs of the same config; `composer-mesh islands` sets most of these
    keys."""

    store: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Address of the object store where the islands meet, such as "file:///shared/run" or
    "s3://bucket/run". Without it and `lighthouse` the run is not an island."""

    lighthouse: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Address of a torchft_lighthouse, such as "http://10.0.0.1:29510", where islands that reach
    each other meet; replaces `store`."""

    host: Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9.-]+$")] = LOOPBACK
    """With `lighthouse`: this machine's address for the other islands, the only one on which it
    listens."""

    rank: CountOrZero = 0
    """This island's number, from 0."""

    world_size: Processes = 1
    """Number of islands."""

    steps_per_round: Count = 10
    """Optimizer steps between two averages of the islands' weights."""

    fragments: Processes = 1
    """Number of parts of the weights, which are averaged one after the other within that many
    steps."""

    overlap_steps: CountOrZero = 0
    """Steps that are trained during a round; 0 waits for its end."""

    mixing: Share = 0.0
    """Share of an island's own weights when a result is merged, as Streaming DiLoCo's alpha. With 0
    the island takes the common weights, and adds its progress in the overlapped steps."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Number format in which outer gradients are sent; with int8 and int4 rounding errors are kept
    for the next round."""

    outer: OuterConfig = Field(default_factory=OuterSgd)
    """The optimizer of the common weights."""

    quorum: Processes = 1
    """Minimum number of islands for a round to close; below it an island continues alone."""

    deadline_s: Seconds = 600.0
    """Seconds for which a round waits for expected islands, by each island's own clock. With
    `lighthouse` also the seconds for which a broken round is retried."""

    max_staleness: CountOrZero = 1
    """Rounds by which a contribution may be late and still be added to the next one; later ones are
    dropped. Not with `lighthouse`."""

    absent_after: Count = 2
    """Rounds without an island's contribution after which no round waits for it. Not with
    `lighthouse`."""

    rounds_kept: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Rounds whose common weights stay in the store, for islands that return. Not with
    `lighthouse`."""

    request_s: Seconds = 60.0
    """Seconds for one request to the store, including its retries; with `lighthouse` for one
    connection or all-reduce."""

    member: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """Identity of this island's run directory; the run makes it at its first start."""

    @property
    def longest_wait_s(self) -> float:
        """Seconds that a step may take longer where a round ends: its deadline, and requests.

        With a lighthouse rounds end one after the other: after the last step, one of each fragment.
        """
        rounds = 1 if self.lighthouse is None else 1 + self.fragments
        return rounds * (self.deadline_s + 10 * self.request_s) if self.on else 0.0

    @property
    def on(self) -> bool:
        """Whether the run is an island."""
        return self.store is not None or self.lighthouse is not None

    @property
    def address(self) -> str | None:
        """Where the islands meet; None for a run that is no island."""
        return self.store or self.lighthouse

    def _problems(self) -> Iterator[str]:
        if self.store is not None:
            yield from self._store_problems(urlsplit(self.store))
        if self.lighthouse is not None:
            yield from self._lighthouse_problems(urlsplit(self.lighthouse))
        elif self.host != LOOPBACK:
            yield (
                f"host is {self.host!r} but only islands with a lighthouse listen: set "
                "lighthouse, or remove host"
            )
        if self.rank >= self.world_size:
            yield (
                f"rank is {self.rank} but world_size is {self.world_size}: give a rank from 0 to "
                f"{self.world_size - 1}"
            )
        if self.quorum > self.world_size:
            yield (
                f"quorum is {self.quorum} but world_size is {self.world_size}, so no round could "
                "ever close: lower quorum"
            )
        if self.overlap_steps >= self.steps_per_round:
            yield (
                f"overlap_steps is {self.overlap_steps} but steps_per_round is "
                f"{self.steps_per_round}, and a round ends before the next begins: lower "
                f"overlap_steps to {self.steps_per_round - 1} or less"
            )
        if self.steps_per_round % self.fragments:
            yield (
                f"steps_per_round is {self.steps_per_round} but fragments is {self.fragments}, and "
                "each fragment has as many steps to itself: make steps_per_round a multiple of "
                "fragments"
            )

    def _store_problems(self, parts: SplitResult) -> Iterator[str]:
        if parts.scheme not in STORES:
            yield (
                f"store is {self.store!r} but must begin with one of "
                f"{', '.join(f'{name}://' for name in STORES)}: write for example "
                "file:///shared/run"
            )
        if "@" in parts.netloc or parts.query:
            yield (
                "store has credentials or options in its address, which everybody can read in "
                "config.toml: set them in the environment, for example AWS_ACCESS_KEY_ID"
            )

    def _lighthouse_problems(self, parts: SplitResult) -> Iterator[str]:
        if self.store is not None:
            yield "store and lighthouse are both set, but islands meet in one way: remove one"
        if parts.scheme != "http" or not parts.hostname or not _port(parts) or "@" in parts.netloc:
            yield (
                f"lighthouse is {self.lighthouse!r} but must be http://HOST:PORT: write for "
                "example http://127.0.0.1:29510"
            )
        if self.world_size > 1 and self.host == LOOPBACK and parts.hostname not in THIS_MACHINE:
            yield (
                f"host is {self.host}, which no other machine reaches, but lighthouse is at "
                f"{parts.hostname}: set host to this machine's address in their network"
            )
        for key in ONLY_STORE:
            if getattr(self, key) != type(self).model_fields[key].default:
                yield (
                    f"{key} is {getattr(self, key)} but is a rule of rounds in a store, and with "
                    f"lighthouse torchft decides: remove {key}, or give store in its place"
                )
        apart = self.steps_per_round // self.fragments
        if self.overlap_steps >= apart:
            yield (
                f"overlap_steps is {self.overlap_steps} but with lighthouse one round is under way "
                f"at a time, and they are {apart} steps apart: lower overlap_steps to {apart - 1} "
                "or less"
            )


def _port(parts: SplitResult) -> int | None:
    """Return the port of an address; None if it has none or a wrong one."""
    try:
        return parts.port
    except ValueError:
        return None
