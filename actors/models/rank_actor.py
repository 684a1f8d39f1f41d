"""An actor that is one rank of several: how the ranks find each other."""

import asyncio
from typing import Any

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.models.ranks import Division, Ranks, Rendezvous, open_store
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device


class RankActor(MeshActor):
    """One process of a group that computes together; alone until it is connected."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._store: Any = None

    @concurrent_endpoint
    async def open_rendezvous(self, deadline_s: float, apart: bool) -> Rendezvous:
        """Listen for the other ranks, before `connect`; return the address.

        Listens on loopback, or on the cluster address if ranks are `apart`, on other hosts.
        """
        rendezvous, self._store = await asyncio.to_thread(open_store, deadline_s, apart)
        return rendezvous

    @concurrent_endpoint
    async def connect(
        self, rank: int, size: int, rendezvous: Rendezvous, deadline_s: float, division: Division
    ) -> None:
        """Join the process groups, before `load`, if there are several ranks. Waits for all."""
        self._ranks = await asyncio.to_thread(
            Ranks.connect, rank, size, rendezvous, deadline_s, own_device(), self._store, division
        )
