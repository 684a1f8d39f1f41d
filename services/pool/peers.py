"""The members of a pool as the actors that call them past the controller know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from composer_mesh.actors.rollout_workers.peers import Peer
from composer_mesh.services.pool.replicas import Replica


class Members(Protocol):
    """What is known of the members of a service, and of why one of them is gone."""

    def members(self) -> Sequence[Replica]: ...
    def reason(self, name: str) -> str: ...


@dataclass
class PoolPeers:
    """Members of a pool that serve, and why those that served before are gone, by name."""

    pool: Members
    peers: tuple[Peer, ...] = ()
    gone: dict[str, str] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Follow the pool; returns whether a member came, went, opened or closed."""
        before, self.peers = self.peers, _serving(self.pool)
        serving = {peer.name for peer in self.peers}
        for peer in before:
            if peer.name not in serving:
                self.gone[peer.name] = self.pool.reason(peer.name)
        return _state(before) != _state(self.peers)


def _serving(pool: Members) -> tuple[Peer, ...]:
    return tuple(
        Peer(one.name, one.actor.ref, one.open)
        for one in pool.members()
        if one.serving and one.actor is not None
    )


def _state(peers: tuple[Peer, ...]) -> list[tuple[str, bool]]:
    return [(peer.name, peer.open) for peer in peers]
