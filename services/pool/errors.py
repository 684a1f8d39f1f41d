"""Errors of a service.

    MeshError
    ├── ServiceBusy     the queue is full; the call reached no replica
    ├── NoReplicaLeft   all replicas are gone and none is starting: an ActorDied, of the last one
    └── ServiceClosed   the service is closed, or was closed while the call waited or ran

`mesh.supervision` has those of the actors themselves, such as `SessionLost`.

The death of a replica whose call may not be retried elsewhere stays an `ActorDied`.
"""

from composer_mesh.mesh.supervision import ActorDied, MeshError


class ServiceBusy(MeshError):
    """A call was refused immediately, because the queue is full."""

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
    """No replica can serve a call, and none is starting."""


class ServiceClosed(MeshError):
    """A call was made to a closed service, or did not end before it closed."""

    def __init__(self, service: str) -> None:
        super().__init__(service)
        self.service = service

    def __str__(self) -> str:
        return (
            f"{self.service} is closed and runs no calls: spawn it anew, "
            "or close it with a drain_s that its calls need"
        )
