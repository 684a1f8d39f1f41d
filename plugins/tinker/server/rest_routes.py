"""What clients read and change of their sessions, samplers, training runs and saved weights.

GET    /api/v1/sessions sessions/{id} samplers/{id} training_runs training_runs/{id} checkpoints
GET    /api/v1/training_runs/{id}/checkpoints      archives/{signed}
GET    /api/v1/training_runs/{id}/checkpoints/{kind}/{name}/archive
DELETE /api/v1/training_runs/{id}/checkpoints/{kind}/{name}      PUT the same with /ttl
POST   /api/v1/sessions/{id}/finish
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.plugins.tinker.server import listings, requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.archives import Archives
from composer_mesh.plugins.tinker.server.paging import cursor, page_of
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.services.web.bodies import INLINE_BYTES

CHECKPOINT = "/api/v1/training_runs/{id}/checkpoints/{kind}/{name}"


class RestRoutes:
    """The handlers of one server."""

    def __init__(self, server: TrainingServer, archives: Archives) -> None:
        self._server, self._bodies, self._archives = server, server.bodies, archives
        self._registry = server.registry

    def routes(self) -> list[Route]:
        """Return the routes."""
        gets = {
            "sessions": self.sessions,
            "sessions/{id}": self.session,
            "samplers/{id}": self.sampler,
            "checkpoints": self.checkpoints,
            "training_runs": self.training_runs,
            "training_runs/{id}": self.training_run,
            "training_runs/{id}/checkpoints": self.checkpoints,
            "archives/{signed}": self.download,
        }
        found = [Route(f"/api/v1/{path}", call) for path, call in gets.items()]
        return [
            *found,
            Route(f"{CHECKPOINT}/archive", self.archive),
            Route(f"{CHECKPOINT}/ttl", self.set_ttl, methods=["PUT"]),
            Route(CHECKPOINT, self.delete_checkpoint, methods=["DELETE"]),
            Route("/api/v1/sessions/{id}/finish", self.finish_session, methods=["POST"]),
        ]

    async def sampler(self, request: Request) -> Response:
        found = self._registry.sampler(client(request), request.path_params["id"])
        return JSONResponse(listings.sampler(found, self._server.served))

    async def sessions(self, request: Request) -> Response:
        own = self._registry.sessions(client(request))
        first, until = page_of(request)
        return JSONResponse({"sessions": [one.id for one in own[first:until]]})

    async def session(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._registry.session(client(request), name)
        return JSONResponse(listings.session(name, client(request), self._registry))

    async def finish_session(self, request: Request) -> Response:
        """Free the session of a program that has ended, and its samplers; its models stay."""
        await self._bodies.read(request, client(request), len)
        await self._registry.end_session(client(request), request.path_params["id"])
        return Response(status_code=204)

    async def training_runs(self, request: Request) -> Response:
        own = self._registry.models(client(request))
        first, until = page_of(request)
        runs = [self._run(one) for one in own[first:until]]
        return JSONResponse({"training_runs": runs, "cursor": cursor(first, until, len(own))})

    async def training_run(self, request: Request) -> Response:
        model = self._registry.model(client(request), request.path_params["id"])
        return JSONResponse(self._run(model))

    def _run(self, model: Any) -> Mapping[str, Any]:
        saved = self._registry.all_saved(model.client, model.id)
        return listings.training_run(model, saved, self._server.served)

    async def checkpoints(self, request: Request) -> Response:
        model_id = request.path_params.get("id")
        if model_id is not None:
            self._registry.model(client(request), model_id)
        own = self._registry.all_saved(client(request), model_id)
        first, until = page_of(request)
        shown = [listings.checkpoint(one) for one in own[first:until]]
        return JSONResponse({"checkpoints": shown, "cursor": cursor(first, until, len(own))})

    async def delete_checkpoint(self, request: Request) -> Response:
        await self._server.delete_saved(client(request), _saved_path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        asked = await self._bodies.read(
            request,
            client(request),
            lambda body: requests.parsed(requests.TimeToLive, body),
            INLINE_BYTES,
        )
        saved = self._registry.saved(client(request), _saved_path(request))
        await self._registry.set_ttl(saved, asked.ttl_seconds)
        return Response(status_code=204)

    async def archive(self, request: Request) -> Response:
        saved = self._registry.saved(client(request), _saved_path(request))
        url, expires = self._archives.url(saved, str(request.base_url))
        return JSONResponse({"url": url, "expires": expires.isoformat()})

    async def download(self, request: Request) -> Response:
        return await self._archives.response(request.path_params["signed"])


def _saved_path(request: Request) -> str:
    parts = request.path_params
    return f"tinker://{parts['id']}/{parts['kind']}/{parts['name']}"
