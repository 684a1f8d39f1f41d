"""Errors of weight transfers."""


class TornWeights(RuntimeError):
    """The received bytes do not all belong to the requested version."""

    def __init__(self, wanted: int, front: int, back: int) -> None:
        super().__init__(wanted, front, back)

    def __str__(self) -> str:
        wanted, front, back = self.args
        return (
            f"asked for weights of version {wanted} but read version stamps {front} and {back}: "
            "the publisher has moved on, so pull the handle of the newest version"
        )


class WrongChecksum(RuntimeError):
    """Received bytes are not the publisher's: tensor, rank of the part, version."""

    def __init__(self, tensor: str, rank: int, version: int) -> None:
        super().__init__(tensor, rank, version)

    def __str__(self) -> str:
        tensor, rank, version = self.args
        return (
            f"{tensor} of rank {rank}'s part of version {version} has another checksum than the "
            "publisher gave it, so bytes changed on the way: pull again, and suspect memory or "
            "network if it comes back"
        )


class PullAbandoned(RuntimeError):
    """A receiver stopped waiting for a version, because another one was requested."""

    def __init__(self, version: int) -> None:
        super().__init__(version)

    def __str__(self) -> str:
        return f"version {self.args[0]} has not arrived, and a newer pull does not wait for it"


class PublisherGone(RuntimeError):
    """Published weights are gone with their publisher: the transport and the location."""

    failure_class = "infrastructure"

    def __init__(self, transport: str, place: str) -> None:
        super().__init__(transport, place)

    def __str__(self) -> str:
        transport, place = self.args
        return (
            f"weights offered by {transport} at {place} are gone, and their publisher with them: "
            "pull from the publisher that took its place"
        )


class TransportUnavailable(RuntimeError):
    """A process cannot use a transport: its name, the reason, and the repair."""

    def __init__(self, transport: str, why: str, repair: str) -> None:
        super().__init__(transport, why, repair)

    def __str__(self) -> str:
        transport, why, repair = self.args
        return f"weights cannot travel by {transport}, because {why}: {repair}"


class WeightsMismatch(ValueError):
    """Published weights do not fit the receiving model, or are incomplete."""
