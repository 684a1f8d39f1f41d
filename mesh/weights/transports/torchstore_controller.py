"""torchstore's controller with asynchronous endpoints only, as Monarch 0.7 wants an actor.

Needs torchstore; nothing else imports this at its top. It is a module of its own because every
process that gets a reference to the actor must find the class by name.
"""

from typing import Any

from monarch.actor import endpoint
from torchstore.controller import Controller


class AsyncController(Controller):
    """The same controller: each of its synchronous endpoints, called from an asynchronous one."""

    @endpoint
    async def get_controller_strategy(self) -> Any:
        """How clients find the volumes."""
        return Controller.get_controller_strategy._method(self)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        """Which volumes have a key."""
        return Controller.locate_volumes._method(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        """A volume has got a key."""
        Controller.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        """A volume loses a key."""
        Controller.notify_delete._method(self, key, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        """All keys, or those below a prefix."""
        found: list[str] = Controller.keys._method(self, prefix)
        return found
