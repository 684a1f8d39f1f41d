"""What a service refuses, and what it loses.

    MeshError
    ├── ServiceBusy     as many calls wait as may wait; the call reached no replica
    ├── NoReplicaLeft   all replicas are gone and none is coming: an ActorDied, of the last one
    ├── ServiceClosed   the service is closed, or was while the call waited or ran
    └── SessionLost     the replica that a session lived on is gone, and the session with it

The death of a replica that no other could stand in for stays an `ActorDied`.
"""

from composer_mesh.mesh.supervision import ActorDied, MeshError


class ServiceBusy(MeshError):
    """A call was refused at once, because the line before the replicas is full."""

    def __init__(self, service: str, waiting: int, queue: int) -> None:
        super().__init__(service, waiting, queue)
        self.service = service
        self.waiting = waiting
        self.queue = queue

    def __str__(self) -> str:
        return (
            f"{self.waiting} calls wait for a replica of {self.service}, but queue is "
            f"{self.queue}: ask again later, resize it, or spawn it with a longer queue"
        )


class NoReplicaLeft(ActorDied):
    """Nobody can serve a call, and nobody will."""


class ServiceClosed(MeshError):
    """A call came too late, or did not end in time."""

    def __init__(self, service: str) -> None:
        super().__init__(service)
        self.service = service

    def __str__(self) -> str:
        return (
            f"{self.service} is closed and runs no calls: spawn it anew, "
            "or close it with a drain_s that its calls need"
        )


class SessionLost(MeshError):
    """What a session held in its replica is gone."""

    def __init__(self, session: str, replica: str, reason: str) -> None:
        super().__init__(session, replica, reason)
        self.session = session
        self.replica = replica
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"session {self.session!r} was lost with {self.replica}: {self.reason}: "
            "begin it again in a new session, or open it with movable=True"
        )
