"""Opens a session on a server, and waits for one that is full or comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from composer_mesh.plugins.openenv.client.connection import Connection, reason_of
from composer_mesh.plugins.openenv.client.errors import (
    ConnectionLost,
    ServerFailure,
    ServerFull,
    ServerTimeout,
)
from composer_mesh.plugins.openenv.client.options import OpenEnvOptions
from composer_mesh.plugins.openenv.client.wire import ErrorCode, ErrorFrame

T = TypeVar("T")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0

Ask = Callable[[Connection], Awaitable[T]]


async def open_and_ask(
    options: OpenEnvOptions, headers: dict[str, str], limit_s: float, ask: Ask[T]
) -> tuple[Connection, T]:
    """Return a new connection and the result of its first questions.

    A server that is full, or cannot be connected to, is tried again for `limit_s` seconds, at
    growing intervals. One that fails after it was connected to is not.
    """
    loop = asyncio.get_running_loop()
    until, wait_s = loop.time() + limit_s, FIRST_WAIT_S
    turned_away: ServerFailure | None = None
    while True:
        connection = Connection(options, headers)
        opened = False
        try:
            await connection.open(max(until - loop.time(), 0.001))
            opened = True
            return connection, await ask(connection)
        except ServerTimeout as late:
            await connection.close()
            raise (late if opened else turned_away or late) from None
        except (ServerFull, ConnectionLost) as failure:
            turned_away = failure
            await connection.close()
            if (opened and not isinstance(failure, ServerFull)) or loop.time() + wait_s >= until:
                raise
        except BaseException:
            await connection.close()
            raise
        await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def full(url: str, frame: ErrorFrame) -> ServerFailure | None:
    """Return the error of a frame that says that the server has no free session."""
    if frame.data.code != ErrorCode.CAPACITY_REACHED:
        return None
    most = frame.data.max_sessions
    return ServerFull(
        url,
        f"had no free session in time, of {most if most is not None else 'an unknown number'} "
        f"({reason_of(frame)}): raise its max_concurrent_envs, or environment.call_s here",
    )
