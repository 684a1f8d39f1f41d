"""The routes of the Tinker protocol, for Starlette.

POST /api/v1/create_session session_heartbeat create_model get_info unload_model
POST /api/v1/forward_backward optim_step save_weights save_weights_for_sampler load_weights
POST /api/v1/create_sampling_session asample retrieve_future cancel_future weights_info
POST /api/v1/client/config client/dynamic_config telemetry
GET  /api/v1/healthz get_server_capabilities metrics      lists and checkpoints: `rest_routes`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.records import Accepted
from composer_mesh.plugins.tinker.server.requests import ClientRequest, check_sample, parsed
from composer_mesh.plugins.tinker.server.rest_routes import (
    Archives,
    RestRoutes,
    capabilities,
    model_info,
    weights_info,
)
from composer_mesh.plugins.tinker.server.results import Result, try_again
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.plugins.tinker.server.training_data import read_training_request
from composer_mesh.services.web.bodies import HANDLERS, INLINE_BYTES
from composer_mesh.services.web.errors import UNAVAILABLE, UNSUPPORTED, RequestRefused

WAIT_S = 20.0
"""Seconds that `retrieve_future` waits for an answer; SDKs wait 45 for it."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"

Model = TypeVar("Model", bound=ClientRequest)
Cancel = Callable[[str, str], Awaitable[None]]


class Routes:
    """The handlers of one server."""

    def __init__(self, server: TrainingServer, cancel: Cancel) -> None:
        self._server, self._bodies, self._cancel = server, server.bodies, cancel
        self._registry = server.registry

    async def healthz(self, _: Request) -> Response:
        if self._server.ended.is_set():
            raise RequestRefused(UNAVAILABLE, "the server is ending")
        return JSONResponse({"status": "ok"})

    async def client_config(self, _: Request) -> Response:
        limits = self._server.served.limits
        bytes_each = int(limits.max_request_mb * 1e6 / 2)
        return JSONResponse(
            {
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_len": min(1024, limits.max_data),
                "fwdbwd_max_chunk_bytes_count": min(5_000_000, bytes_each),
                "sample_max_concurrent_requests": min(2000, limits.max_open_per_client),
                "create_model_via_load_weights": True,
            }
        )

    async def dynamic_config(self, _: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def capabilities(self, _: Request) -> Response:
        return JSONResponse(capabilities(self._server.served))

    async def telemetry(self, request: Request) -> Response:
        await self._bodies.read(request, client(request), len)
        return JSONResponse({"status": "accepted"})

    async def metrics(self, _: Request) -> Response:
        return JSONResponse(self._server.metrics())

    async def create_session(self, request: Request) -> Response:
        await self._parsed(request, requests.CreateSession)
        session = await self._registry.create_session(client(request))
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.OfSession)
        await self._registry.touch(client(request), parsed.session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def create_model(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.CreateModel)
        accepted = await self._server.create_model(client(request), parsed)
        name = f"{parsed.session_id}:train:{parsed.model_seq_id}"
        return JSONResponse(accepted.body(name))

    async def get_info(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.OfModel)
        model = self._registry.model(client(request), parsed.model_id)
        return JSONResponse(model_info(model, self._server.served))

    async def unload_model(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.OfModel)
        accepted = await self._server.unload(client(request), parsed.model_id)
        return JSONResponse(accepted.body(parsed.model_id))

    async def forward_backward(self, request: Request) -> Response:
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestRefused(
                UNSUPPORTED, f"send the data as {PROTOBUF}, as SDKs from 0.25.0 on do"
            )
        own, limits = client(request), self._server.served.data
        parsed = await self._bodies.read(
            request, own, lambda body: read_training_request(body, limits)
        )
        return _accepted(await self._server.train(own, parsed), parsed.model_id)

    async def optim_step(self, request: Request) -> Response:
        return await self._change(request, requests.OptimStep, "optim_step")

    async def save_weights(self, request: Request) -> Response:
        return await self._change(request, requests.SaveWeights, "save_weights")

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._change(request, requests.SaveForSampler, "save_weights_for_sampler")

    async def load_weights(self, request: Request) -> Response:
        return await self._change(request, requests.LoadWeights, "load_weights")

    async def _change(self, request: Request, kind: type[ClientRequest], name: str) -> Response:
        parsed: Any = await self._parsed(request, kind)
        accepted = await self._server.change(client(request), name, parsed)
        return _accepted(accepted, parsed.model_id or "")

    async def create_sampler(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.CreateSampler)
        sampler = await self._server.create_sampler(client(request), parsed)
        body = {"type": "create_sampling_session", "sampling_session_id": sampler.id}
        return JSONResponse(body)

    async def asample(self, request: Request) -> Response:
        own, served = client(request), self._server.served

        def made(body: bytes) -> requests.SampleRequest:
            found = parsed(requests.SampleRequest, body)
            check_sample(found, served.data, served.limits)  # counts all tokens, however many
            return found

        sample = await self._bodies.read(request, own, made)
        accepted = await self._server.sample(own, sample)
        names = [f"{accepted.request_id}/{n}" for n in range(sample.num_samples)]
        return JSONResponse(accepted.body(sample_sequence_ids=names))

    async def retrieve_future(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.OfRequest)
        found = await self._server.result(client(request), parsed.request_id, WAIT_S)
        if found is None:
            state = "paused_capacity" if self._server.is_full else "active"
            return JSONResponse(try_again(parsed.request_id, state))
        return _result(found)

    async def cancel_future(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.OfRequest)
        await self._cancel(client(request), parsed.request_id)
        return Response(status_code=204)

    async def weights_info(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.WeightsInfo)
        saved = self._registry.saved(client(request), parsed.tinker_path)
        return JSONResponse(weights_info(saved, self._server.served))

    async def _parsed(self, request: Request, kind: type[Model]) -> Model:
        return await self._bodies.read(
            request, client(request), lambda body: parsed(kind, body or b"{}"), INLINE_BYTES
        )


def make_app(
    server: TrainingServer, cancel: Cancel, archives: Archives, further: Sequence[Route] = ()
) -> Starlette:
    """Return the application, with the routes of further APIs."""
    do, rest = Routes(server, cancel), RestRoutes(server, archives)
    posts = {
        "client/config": do.client_config,
        "client/dynamic_config": do.dynamic_config,
        "telemetry": do.telemetry,
        "create_session": do.create_session,
        "session_heartbeat": do.heartbeat,
        "create_model": do.create_model,
        "get_info": do.get_info,
        "unload_model": do.unload_model,
        "forward_backward": do.forward_backward,
        "optim_step": do.optim_step,
        "save_weights": do.save_weights,
        "save_weights_for_sampler": do.save_for_sampler,
        "load_weights": do.load_weights,
        "create_sampling_session": do.create_sampler,
        "asample": do.asample,
        "retrieve_future": do.retrieve_future,
        "cancel_future": do.cancel_future,
        "weights_info": do.weights_info,
    }
    gets = {
        "healthz": do.healthz,
        "get_server_capabilities": do.capabilities,
        "metrics": do.metrics,
    }
    routes = [Route(f"/api/v1/{path}", call, methods=["POST"]) for path, call in posts.items()]
    routes += [Route(f"/api/v1/{path}", call) for path, call in gets.items()]
    routes += [*rest.routes(), *further]
    return Starlette(routes=routes, exception_handlers=HANDLERS)


def _accepted(accepted: Accepted, model: str) -> Response:
    return JSONResponse(accepted.body(model))


def _result(found: Result) -> Response:
    return Response(found.content, media_type=PROTOBUF if found.media == "protobuf" else JSON)
