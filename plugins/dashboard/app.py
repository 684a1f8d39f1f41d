"""The application: addresses, the pages behind them, and their live parts.

Reads are GET and change nothing. `POST` exists for the token, and with `control` to stop and scale
a run. Handlers are plain functions, which Starlette runs in threads, since they read files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
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
from composer_mesh.plugins.dashboard import replay_views, rollout_views, run_views
from composer_mesh.plugins.dashboard.access import Guard, Sessions, UserOf, local_path
from composer_mesh.plugins.dashboard.catalog import Catalog, RunSummary, differing
from composer_mesh.plugins.dashboard.charted import charts_of_runs
from composer_mesh.plugins.dashboard.live import LiveConnections
from composer_mesh.plugins.dashboard.live_parts import PartsOfRun, PartsOfRuns
from composer_mesh.plugins.dashboard.open_runs import OpenRun, OpenRuns
from composer_mesh.plugins.dashboard.options import DashboardOptions
from composer_mesh.plugins.dashboard.pages import render
from composer_mesh.plugins.dashboard.requests import (
    SMOOTHINGS,
    SORTS,
    ChartOptions,
    RolloutFilter,
    colouring_of,
    page_of,
)
from composer_mesh.plugins.dashboard.series import AXES, AXIS_TITLES
from composer_mesh.plugins.dashboard.table import RunTable
from composer_mesh.plugins.dashboard.tokens import COLOURINGS, Tokenizers
from composer_mesh.services.directory.control import ControlRefused, ask
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.scale_command import read_sizes
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing

STATIC = Path(__file__).parent / "static"
MOST_COMPARED = 8
UNREADABLE = (RunUnavailable, StoreMissing, StoreError, DamagedRecord)
"""Errors of a run's files that a page shows, with what to do."""
LONGEST_FORM = 4096
OVERVIEW = ("figures", "actors", "charts")
MESH = ("figures", "mesh", "timeline")
EVENTS = ("figures", "events")
"""Live parts of the pages of a run."""
ORDER_S = 3.0
"""Seconds that a page waits until a run has done what a form asked for."""


@dataclass(frozen=True)
class Dashboard:
    """What all requests share."""

    options: DashboardOptions
    sessions: Sessions
    catalog: Catalog
    open_runs: OpenRuns
    live: LiveConnections
    rollouts: rollout_views.RolloutReader

    @classmethod
    def of(cls, options: DashboardOptions, sessions: Sessions) -> Dashboard:
        catalog, reader = Catalog(options.folder), rollout_views.RolloutReader(Tokenizers())
        return cls(options, sessions, catalog, OpenRuns(), LiveConnections(), reader)

    def found(self, request: Request) -> tuple[RunSummary, OpenRun]:
        """Return the run of an address; raises 404 for an unknown one."""
        summary = self.catalog.run(request.path_params["run"])
        if summary is None:
            raise HTTPException(404, "there is no such run here")
        return summary, self.open_runs.of(summary.root)

    def page(self, name: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        """Return a page."""
        about = {"control": self.options.control, "form": self.sessions.form}
        return HTMLResponse(render(name, {**about, **context}), status)


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
            "runs": table.page_of(shown),
            "total": len(shown),
            "differences": differing(shown),
            "complete": self._on.catalog.complete,
            "folder": self._on.options.folder,
        }

    def live_runs(self, request: Request) -> Response:
        table = RunTable.of(request.query_params)
        return self._on.live.response(PartsOfRuns(self._on.catalog, table, self._runs))

    def compare(self, request: Request) -> Response:
        slugs = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        runs = [run for slug in slugs if (run := self._on.catalog.run(slug)) is not None]
        options = ChartOptions.of(request.query_params)
        columns = [(run, self._on.open_runs.of(run.root).columns) for run in runs]
        context = {
            "runs": runs,
            "every": self._on.catalog.runs(),
            "most": MOST_COMPARED,
            "charts": charts_of_runs(columns, options.axis, options.smoothing),
            "differences": differing(runs),
            **_chart_choices(options),
        }
        return self._on.page("compare.html", context)

    def overview(self, request: Request) -> Response:
        choices = _chart_choices(ChartOptions.of(request.query_params))
        return self._on.page("overview.html", {**self._parts(request, OVERVIEW), **choices})

    def live_overview(self, request: Request) -> Response:
        return self._live(request, OVERVIEW)

    def mesh(self, request: Request) -> Response:
        choices = {"choices": run_views.TIMELINE_STEPS}
        return self._on.page("mesh.html", {**self._parts(request, MESH), **choices})

    def live_mesh(self, request: Request) -> Response:
        return self._live(request, MESH)

    def events(self, request: Request) -> Response:
        return self._on.page("events.html", self._parts(request, EVENTS))

    def live_events(self, request: Request) -> Response:
        return self._live(request, EVENTS)

    def _parts(self, request: Request, names: Collection[str]) -> dict[str, Any]:
        """Return what the templates of these parts of a run's page show, and nothing for others."""
        summary, run = self._on.found(request)
        query = request.query_params
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "figures": lambda: run_views.figures_of(summary, run),
            "charts": lambda: run_views.charts(summary, run, ChartOptions.of(query)),
            "actors": lambda: run_views.mesh(summary, run),
            "mesh": lambda: run_views.mesh(summary, run),
            "timeline": lambda: run_views.timeline(run, run_views.steps_wanted(query.get("steps"))),
            "events": lambda: run_views.events(run, query.get("kind", ""), page_of(query)),
        }
        found: dict[str, Any] = {"summary": summary}
        for name in names:
            found |= made[name]()
        return found

    def rollouts(self, request: Request) -> Response:
        return self._on.page("rollouts.html", self._rollouts(request))

    def _rollouts(self, request: Request) -> dict[str, Any]:
        summary, run = self._on.found(request)
        wanted = RolloutFilter.of(request.query_params)
        listed = rollout_views.rollout_list(summary.root, wanted)
        return {**run_views.figures_of(summary, run), **listed, "sorts": list(SORTS)}

    def rollout(self, request: Request) -> Response:
        summary, run = self._on.found(request)
        query, name = request.query_params, request.path_params["trace"]
        full = query.get("full") == "1"
        one = self._on.rollouts.one(summary.root, name, colouring_of(query), full)
        context = {**run_views.figures_of(summary, run), **one, "colourings": COLOURINGS}
        return self._on.page("rollout.html", context)

    def group(self, request: Request) -> Response:
        summary, run = self._on.found(request)
        found = self._on.rollouts.group(summary.root, request.path_params["group"])
        if found is None:
            raise HTTPException(404, "the run has stored no rollouts of this group")
        return self._on.page("group.html", {**run_views.figures_of(summary, run), **found})

    def replay(self, request: Request) -> Response:
        summary, run = self._on.found(request)
        found = replay_views.replay(summary.root, run, page_of(request.query_params))
        return self._on.page("replay.html", {**run_views.figures_of(summary, run), **found})

    def config(self, request: Request) -> Response:
        summary, run = self._on.found(request)
        text = run_views.config_text(summary.root)
        return self._on.page("config.html", {**run_views.figures_of(summary, run), "text": text})

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
        with suppress(TimeoutError):  # the run goes on with it, and its events tell the outcome
            await asyncio.wait_for(ask(summary.root, command, **arguments), ORDER_S)
        return RedirectResponse(f"/runs/{summary.slug}/mesh", 303)

    def _live(self, request: Request, names: Collection[str]) -> Response:
        about = {"control": self._on.options.control, "form": self._on.sessions.form}
        summary, _ = self._on.found(request)
        parts = PartsOfRun(
            summary.root, names, lambda changed: {**about, **self._parts(request, changed)}
        )
        return self._on.live.response(parts)


def make_app(dashboard: Dashboard, user_of: UserOf | None = None) -> ASGIApp:
    """Return the application behind the check of the token, or of the user without one."""
    pages = _Pages(dashboard)
    of_run = [
        Route("/", pages.overview),
        Route("/live", pages.live_overview),
        Route("/mesh", pages.mesh),
        Route("/mesh/live", pages.live_mesh),
        Route("/events", pages.events),
        Route("/events/live", pages.live_events),
        Route("/rollouts", pages.rollouts),
        Route("/rollouts/{trace:path}", pages.rollout),
        Route("/groups/{group:int}", pages.group),
        Route("/replay", pages.replay),
        Route("/config", pages.config),
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
