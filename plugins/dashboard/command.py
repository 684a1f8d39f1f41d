"""The command: serves the page until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from composer_mesh.plugins.dashboard.access import Sessions
from composer_mesh.plugins.dashboard.app import Dashboard, make_app
from composer_mesh.plugins.dashboard.options import DashboardOptions
from composer_mesh.services.web.access import Access
from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.services.web.options import ServeRefused

CLOSING_S = 2


def dashboard_command(
    options: DashboardOptions, token_env: str | None, say: Callable[[str], None]
) -> int:
    """Serve the runs of a folder until a signal ends it; return the exit status.

    Raises ServeRefused before anything starts.
    """
    if not options.folder.is_dir():
        raise ServeRefused(
            f"{options.folder} is no folder: name the one that holds your runs, or a run"
        )
    token = options.token(token_env)
    asyncio.run(_until_a_signal(options, token, say))
    return 0


async def _until_a_signal(
    options: DashboardOptions, token: str, say: Callable[[str], None]
) -> None:
    ended = asyncio.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(one, ended.set)
    async with serving(options, token) as port:
        name = f"[{options.host}]" if ":" in options.host else options.host
        made = f"?token={token}" if token and options.control else ""
        say(f"dashboard of {options.folder}: http://{name}:{port}/{made}  (Ctrl-C ends it)")
        await ended.wait()


@asynccontextmanager
async def serving(options: DashboardOptions, token: str) -> AsyncIterator[int]:
    """Serve for a block; yields the port."""
    dashboard = Dashboard.of(options, Sessions(token))
    threading.Thread(target=dashboard.catalog.read_all, name="runs", daemon=True).start()
    app = Access(make_app(dashboard), options.names, "")

    def close_streams() -> None:
        dashboard.live.closing = True

    with listening_socket(options.host, options.port) as listener:
        config = http_config(app, CLOSING_S)
        async with listening(config, listener, before_end=close_streams) as port:
            yield port
