"""What can be wrong with weights that arrive."""


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


class PullAbandoned(RuntimeError):
    """A receiver stopped waiting for a version, because another one was asked of it."""

    def __init__(self, version: int) -> None:
        super().__init__(version)

    def __str__(self) -> str:
        return f"version {self.args[0]} has not arrived, and a newer pull does not wait for it"


class WeightsMismatch(ValueError):
    """A model does not have the parameters that a manifest names."""
