"""What can be wrong with weights that arrive, and why they may not arrive at all."""


class TornWeights(RuntimeError):
    """The bytes that arrived do not all belong to the version that was asked for."""

    def __init__(self, wanted: int, front: int, back: int) -> None:
        super().__init__(wanted, front, back)

    def __str__(self) -> str:
        wanted, front, back = self.args
        return (
            f"asked for weights of version {wanted} but read marks {front} and {back}: "
            "the publisher has moved on, so pull the handle of the newest version"
        )


class WrongChecksum(RuntimeError):
    """Bytes arrived that are not those of the publisher: tensor, rank of the part, version."""

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
    """A receiver stopped waiting for a version, because another one was asked of it."""

    def __init__(self, version: int) -> None:
        super().__init__(version)

    def __str__(self) -> str:
        return f"version {self.args[0]} has not arrived, and a newer pull does not wait for it"


class PublisherGone(RuntimeError):
    """What a publisher offered has gone with it: the transport, where it was."""

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
    """A process cannot use a transport: its name, why not, and what helps."""

    def __init__(self, transport: str, why: str, repair: str) -> None:
        super().__init__(transport, why, repair)

    def __str__(self) -> str:
        transport, why, repair = self.args
        return f"weights cannot travel by {transport}, because {why}: {repair}"


class WeightsMismatch(ValueError):
    """Published weights do not make the model that they are for, or are not whole."""
