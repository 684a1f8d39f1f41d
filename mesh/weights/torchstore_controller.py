"""torchstore's controller with asynchronous endpoints only, as Monarch 0.7 requires.

Needs torchstore, so other modules import it lazily. It is a separate module because every process
that gets a reference to the actor must be able to import the class.
"""

from typing import Any

from monarch.actor import endpoint
from torchstore.controller import Controller


class AsyncController(Controller):
    """torchstore's controller, with each synchronous endpoint wrapped in an asynchronous one."""

    @endpoint
    async def get_controller_strategy(self) -> Any:
        """Return the strategy by which clients find the volumes."""
        return Controller.get_controller_strategy._method(self)

    @endpoint
    async def locate_volumes(self, key: str) -> Any:
        """Return the volumes that have a key."""
        return Controller.locate_volumes._method(self, key)

    @endpoint
    async def notify_put(self, key: str, request: Any, storage_volume_id: str) -> None:
        """Record that a volume stores a key."""
        Controller.notify_put._method(self, key, request, storage_volume_id)

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        """Record that a volume deletes a key."""
        Controller.notify_delete._method(self, key, storage_volume_id)

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        """Return all keys, or those below a prefix."""
        return Controller.keys._method(self, prefix)
