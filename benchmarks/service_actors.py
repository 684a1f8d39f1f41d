"""Echo actors for `service_call.py`: one of ours and one of Ray's.

Does not import Ray.
"""

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor


class Echo(MeshActor):
    """Returns its input."""

    @concurrent_endpoint
    async def echo(self, payload: bytes) -> bytes:
        return payload


class PlainEcho:
    """The same for Ray."""

    def echo(self, payload: bytes) -> bytes:
        return payload
