"""Errors of weight transfers."""

from composer_mesh.configs.worded import Worded


class TornWeights(Worded, RuntimeError):
    """The received bytes do not all belong to the requested version: it, and both stamps read."""

    message = (
        "asked for weights of version {0} but read version stamps {1} and {2}: "
        "the publisher has moved on, so pull the handle of the newest version"
    )


class WrongChecksum(Worded, RuntimeError):
    """Received bytes are not the publisher's: tensor, rank of the part, version."""

    message = (
        "{0} of rank {1}'s part of version {2} has another checksum than the publisher gave it, so "
        "bytes changed on the way: pull again, and suspect memory or network if it comes back"
    )


class PullAbandoned(Worded, RuntimeError):
    """A receiver stopped waiting for a version, because another one was requested."""

    message = "version {0} has not arrived, and a newer pull does not wait for it"


class PublisherGone(Worded, RuntimeError):
    """Published weights are gone with their publisher: the transport and the location."""

    failure_class = "infrastructure"
    message = (
        "weights offered by {0} at {1} are gone, and their publisher with them: "
        "pull from the publisher that took its place"
    )


class TransportUnavailable(Worded, RuntimeError):
    """A process cannot use a transport: its name, the reason, and the repair."""

    message = "weights cannot travel by {0}, because {1}: {2}"


class WeightsMismatch(ValueError):
    """Published weights do not fit the receiving model, or are incomplete."""
