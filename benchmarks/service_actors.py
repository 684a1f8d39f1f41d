"""What `service_call.py` calls: the same answer, once as an actor of ours and once as Ray's.

Nothing here measures, and Ray is not imported here.
"""

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor


class Echo(MeshActor):
    """Gives back what it gets."""

    @concurrent_endpoint
    async def echo(self, payload: bytes) -> bytes:
        return payload


class PlainEcho:
    """The same for Ray."""

    def echo(self, payload: bytes) -> bytes:
        return payload
