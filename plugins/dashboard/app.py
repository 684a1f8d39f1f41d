"""The application: its options, addresses, the pages behind them, their live parts, its command.

Reads are GET and change nothing. `POST` exists for the token, and with `control` to stop and scale
a run. Handlers are plain functions, which Starlette runs in threads, since they read files.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.plugins.dashboard import mesh_tree, rollout_views, run_views, timeline
from composer_mesh.plugins.dashboard.access import Guard, Sessions, UserOf, local_path
from composer_mesh.plugins.dashboard.catalog import Catalog, RunSummary, differing
from composer_mesh.plugins.dashboard.charts import charts_of_run, charts_of_runs
from composer_mesh.plugins.dashboard.live import LiveConnections, PageParts, parts_of_run
from composer_mesh.plugins.dashboard.open_runs import OpenRun, open_run
from composer_mesh.plugins.dashboard.pages import render
from composer_mesh.plugins.dashboard.requests import (
    SMOOTHINGS,
    ChartOptions,
    RolloutFilter,
    RunTable,
    colouring_of,
    page_of,
)
from composer_mesh.plugins.dashboard.series import AXES, AXIS_TITLES
from composer_mesh.services.directory.control import ControlRefused, ask
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.scale_command import read_sizes
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing
from composer_mesh.services.web.http_server import Access, http_config, listening, listening_socket
from composer_mesh.services.web.options import ListenOptions, ServeRefused, checked_token

TOKEN_BYTES = 24


class DashboardOptions(ListenOptions):
    """Where the runs are, and where the page is served; `control` lets it stop and scale runs."""

    folder: Path
    port: int = 8200
    control: bool = False

    def token(self, token_env: str | None) -> str:
        """Return the token that visitors need; empty on loopback, where nothing can be changed.

        With `control` there is always one: it is made where none is named. Raises ServeRefused.
        """
        found = checked_token(self, token_env)
        return found or (secrets.token_urlsafe(TOKEN_BYTES) if self.control else "")


STATIC = Path(__file__).parent / "static"
MOST_COMPARED = 8
UNREADABLE = (RunUnavailable, StoreMissing, StoreError, DamagedRecord)
"""Errors of a run's files that a page shows, with what to do."""
LONGEST_FORM = 4096
Endpoint = Callable[[Request], Response]
ORDER_S = 3.0
"""Seconds that a page waits until a run has done what a form requested."""


@dataclass(frozen=True)
class Dashboard:
    """What all requests share."""

    options: DashboardOptions
    sessions: Sessions
    catalog: Catalog
    live: LiveConnections

    @classmethod
    def of(cls, options: DashboardOptions, sessions: Sessions) -> Dashboard:
        return cls(options, sessions, Catalog(options.folder), LiveConnections())

    def found(self, request: Request) -> tuple[RunSummary, OpenRun]:
        """Return the run of an address; raises 404 for an unknown one."""
        summary = self.catalog.run(request.path_params["run"])
        if summary is None:
            raise HTTPException(404, "there is no such run here")
        return summary, open_run(summary.root)

    def page(self, name: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        """Return a page."""
        return HTMLResponse(render(name, {**self.about, **context}), status)

    @property
    def about(self) -> dict[str, Any]:
        """What all templates show."""
        return {"control": self.options.control, "form": self.sessions.form}


class _Pages:
    """One method for each address."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._on = dashboard

    def runs(self, request: Request) -> Response:
        table = RunTable.of(request.query_params)
        shown = table.shown(self._on.catalog.runs())
        return self._on.page("runs.html", self._runs(table, shown))

    def _runs(self, table: RunTable, shown: list[RunSummary]) -> dict[str, Any]:
        return {
            "table": table,
            "runs": table.on_page(shown),
            "total": len(shown),
            "differences": differing(shown),
            "complete": self._on.catalog.complete,
            "folder": self._on.options.folder,
        }

    def live_runs(self, request: Request) -> Response:
        catalog, table = self._on.catalog, RunTable.of(request.query_params)
        parts = PageParts(
            lambda: {"runs": [(run.slug, run.state, run.updated) for run in catalog.runs()]},
            lambda _: render("_runs.html", self._runs(table, table.shown(catalog.runs()))),
        )
        return self._on.live.response(parts)

    def compare(self, request: Request) -> Response:
        slugs = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        runs = [run for slug in slugs if (run := self._on.catalog.run(slug)) is not None]
        options = ChartOptions.of(request.query_params)
        columns = [(run, open_run(run.root).columns) for run in runs]
        context = {
            "runs": runs,
            "every": self._on.catalog.runs(),
            "most": MOST_COMPARED,
            "charts": charts_of_runs(columns, options.axis, options.smoothing),
            "differences": differing(runs),
            **_chart_choices(options),
        }
        return self._on.page("compare.html", context)

    def of_run(self, template: str, *parts: str) -> Endpoint:
        """Return the handler of a page of a run with these parts, below the run's figures."""

        def page(request: Request) -> Response:
            return self._on.page(template, self._parts(request, ("figures", *parts)))

        return page

    def live(self, *parts: str) -> Endpoint:
        """Return the handler of the live parts of a page of a run."""

        def stream(request: Request) -> Response:
            summary, _ = self._on.found(request)

            def html(name: str) -> str:
                return render(f"_{name}.html", self._on.about | self._parts(request, (name,)))

            return self._on.live.response(parts_of_run(summary.root, parts, html))

        return stream

    def _parts(self, request: Request, names: Collection[str]) -> dict[str, Any]:
        """Return what the templates of these parts of a run's page show, and nothing for others."""
        summary, run = self._on.found(request)
        query, named, root = request.query_params, request.path_params, summary.root
        options = ChartOptions.of(query)
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "figures": lambda: run_views.figures_of(summary, run),
            "charts": lambda: {
                "charts": charts_of_run(
                    run.columns, summary.evaluations, options.axis, options.smoothing
                )
            },
            "choices": lambda: _chart_choices(options),
            "actors": lambda: mesh_tree.mesh(summary, run),
            "mesh": lambda: mesh_tree.mesh(summary, run),
            "timeline": lambda: timeline.last_steps(run, query.get("steps")),
            "events": lambda: run_views.events(run, query.get("kind", ""), page_of(query)),
            "rollouts": lambda: rollout_views.rollout_list(root, RolloutFilter.of(query)),
            "rollout": lambda: rollout_views.rollout(
                root, named["trace"], colouring_of(query), query.get("full") == "1"
            ),
            "group": lambda: rollout_views.group(root, named["group"]),
            "replay": lambda: run_views.replay(root, run, page_of(query)),
            "config": lambda: {"text": run_views.config_text(root)},
        }
        found: dict[str, Any] = {"summary": summary}
        for name in names:
            found |= made[name]()
        return found

    def login_form(self, request: Request) -> Response:
        return self._on.page("login.html", {"where": request.url.path, "refused": False}, 401)

    async def login(self, request: Request) -> Response:
        form = await _form(request)
        given, where = str(form.get("token", "")), local_path(str(form.get("where", "/")))
        if not self._on.sessions.token or self._on.sessions.fits(given):
            return self._on.sessions.begin(where)
        return self._on.page("login.html", {"where": where, "refused": True}, 401)

    async def stop(self, request: Request) -> Response:
        """Let a run write a checkpoint and end."""
        return await self._order(request, lambda _: ("stop", {"now": False}))

    async def scale(self, request: Request) -> Response:
        """Change the number of replicas of a kind."""

        def order(form: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
            return "scale", read_sizes([f"{form.get('kind', '')}={form.get('replicas', '')}"])

        return await self._order(request, order)

    async def _order(
        self, request: Request, order: Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]
    ) -> Response:
        form = await _form(request)
        if not self._on.sessions.is_own_form(request, str(form.get("form", ""))):
            raise HTTPException(403, "only a form of this page may change a run")
        summary = self._on.catalog.run(request.path_params["run"])
        if summary is None:
            raise HTTPException(404, "there is no such run here")
        command, arguments = order(form)
        with suppress(TimeoutError):  # the run continues with it, and its events tell the outcome
            await asyncio.wait_for(ask(summary.root, command, **arguments), ORDER_S)
        return RedirectResponse(f"/runs/{summary.slug}/mesh", 303)


def make_app(dashboard: Dashboard, user_of: UserOf | None = None) -> ASGIApp:
    """Return the application behind the check of the token, or of the user without one."""
    pages = _Pages(dashboard)
    of_run = [
        Route("/", pages.of_run("overview.html", "actors", "charts", "choices")),
        Route("/live", pages.live("figures", "actors", "charts")),
        Route("/mesh", pages.of_run("mesh.html", "mesh", "timeline")),
        Route("/mesh/live", pages.live("figures", "mesh", "timeline")),
        Route("/events", pages.of_run("events.html", "events")),
        Route("/events/live", pages.live("figures", "events")),
        Route("/rollouts", pages.of_run("rollouts.html", "rollouts")),
        Route("/rollouts/{trace:path}", pages.of_run("rollout.html", "rollout")),
        Route("/groups/{group:int}", pages.of_run("group.html", "group")),
        Route("/replay", pages.of_run("replay.html", "replay")),
        Route("/config", pages.of_run("config.html", "config")),
    ]
    if dashboard.options.control:
        of_run += [
            Route("/stop", pages.stop, methods=["POST"]),
            Route("/scale", pages.scale, methods=["POST"]),
        ]
    routes = [
        Route("/", pages.runs),
        Route("/live", pages.live_runs),
        Route("/compare", pages.compare),
        Route("/login", pages.login, methods=["POST"]),
        Mount("/runs/{run}", routes=of_run),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]

    def shown(_: Request, error: Exception) -> Response:
        return _error_page(dashboard, error)

    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ControlRefused, *UNREADABLE), shown)
    app = Starlette(routes=routes, exception_handlers=handlers)
    login = Starlette(routes=[Route("/{path:path}", pages.login_form, methods=["GET", "POST"])])
    return Guard(app, dashboard.sessions, login, user_of)


def _error_page(dashboard: Dashboard, error: Exception) -> Response:
    status, text = 409, str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    elif isinstance(error, RunUnavailable | StoreMissing):
        status = 404
    return dashboard.page("error.html", {"status": status, "text": text}, status)


def _chart_choices(options: ChartOptions) -> dict[str, Any]:
    titles = {axis: AXIS_TITLES[axis] for axis in AXES}
    return {"chart_options": options, "axes": titles, "smoothings": SMOOTHINGS}


async def _form(request: Request) -> Mapping[str, Any]:
    if int(request.headers.get("content-length") or LONGEST_FORM + 1) > LONGEST_FORM:
        raise HTTPException(413, f"send at most {LONGEST_FORM} bytes, with their length")
    return dict(parse_qsl((await request.body()).decode(errors="replace")))


CLOSING_S = 2


def dashboard_command(
    options: DashboardOptions, token_env: str | None, say: Callable[[str], None]
) -> int:
    """Serve the runs of a folder until a signal ends it; return the exit status.

    Raises ServeRefused before anything starts.
    """
    if not options.folder.is_dir():
        raise ServeRefused(
            f"{options.folder} is not a folder: name the one that holds your runs, or a run"
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
