"""A service on a fake host that replaces its dead at once, and what it tells."""

from __future__ import annotations

from typing import Any

from fake_host import FakeHost, serve, until

from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.service import Service

AT_ONCE = RestartRules(restarts=2, backoff_s=1e-9, backoff_max_s=1e-9)
Events = list[tuple[str, str, str, dict[str, Any]]]


async def healing(host: FakeHost, events: Events, n: int = 2, **options: Any) -> Service:
    """A service that tells `events` what it does."""

    def record(kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        events.append((kind, actor, detail, fields))

    return await serve(host, n, **{"restart": AT_ONCE, "record": record, **options})


def states(pool: Service) -> dict[str, str]:
    """The state of each replica by its name."""
    return {line["name"]: line["state"] for line in pool.status()}


async def until_served(pool: Service, name: str) -> None:
    """Wait until a replica of this name serves."""
    await until(lambda: states(pool).get(name) == "ready")


async def until_told(events: Events, kind: str) -> None:
    """Wait for an event of this kind."""
    await until(lambda: kind in {event[0] for event in events})
