"""The command: serves the page until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from composer_mesh.services.dashboard.access import Sessions
from composer_mesh.services.dashboard.app import Dashboard, make_app
from composer_mesh.services.dashboard.options import DashboardOptions
from composer_mesh.services.serve_env.access import Access
from composer_mesh.services.serve_env.options import ServeRefused
from composer_mesh.services.serve_env.sockets import reusable_socket

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
    server = _Server(_uvicorn_config(app))
    with reusable_socket(options.host, options.port) as listener:
        running = asyncio.create_task(server.serve([listener]))
        try:
            while not server.started:
                await asyncio.wait([running], timeout=0.01)
                if running.done():
                    await running
                    raise RuntimeError("the server has ended before it began to serve")
            yield int(listener.getsockname()[1])
        finally:
            dashboard.live.closing = True
            server.should_exit = True
            await running


class _Server(uvicorn.Server):
    """Leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: Access) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSING_S,
    )
