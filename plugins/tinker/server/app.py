"""The routes of the Tinker protocol, for Starlette.

POST /api/v1/create_session session_heartbeat create_model get_info unload_model
POST /api/v1/forward_backward optim_step save_weights save_weights_for_sampler load_weights
POST /api/v1/create_sampling_session asample retrieve_future cancel_future weights_info
POST /api/v1/client/config client/dynamic_config telemetry
GET  /api/v1/healthz get_server_capabilities metrics      lists and checkpoints: `rest_routes`
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.requests import ClientRequest, check_sample, parsed
from composer_mesh.plugins.tinker.server.rest_routes import Archives, RestRoutes, lora
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.plugins.tinker.server.training_data import read_training_request
from composer_mesh.services.web.bodies import HANDLERS, INLINE_BYTES
from composer_mesh.services.web.errors import UNAVAILABLE, UNSUPPORTED, RequestRefused

WAIT_S = 20.0
"""Seconds that `retrieve_future` waits for an answer; SDKs wait 45 for it."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"

Answer = Mapping[str, Any]
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
        served = self._server.served
        about = {"model_name": served.base_model, "max_context_length": served.data.context}
        model = {**about, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def telemetry(self, request: Request) -> Response:
        await self._bodies.read(request, client(request), len)
        return JSONResponse({"status": "accepted"})

    async def metrics(self, _: Request) -> Response:
        return JSONResponse(self._server.metrics())

    async def create_session(self, own: str, _: ClientRequest) -> Answer:
        session = await self._registry.create_session(own)
        return {"type": "create_session", "session_id": session.id}

    async def heartbeat(self, own: str, given: requests.OfSession) -> Answer:
        await self._registry.touch(own, given.session_id)
        return {"type": "session_heartbeat"}

    async def create_model(self, own: str, given: requests.CreateModel) -> Answer:
        accepted = await self._server.create_model(own, given)
        return accepted.body(f"{given.session_id}:train:{given.model_seq_id}")

    async def get_info(self, own: str, given: requests.OfModel) -> Answer:
        """Say how a model was created, and from where its tokenizer is loaded."""
        model, served = self._registry.model(own, given.model_id), self._server.served
        return {
            "type": "get_info",
            "model_data": {
                "model_name": served.base_model,
                "tokenizer_id": served.tokenizer or None,
            },
            "model_id": model.id,
            "model_name": served.base_model,
            **lora(model.spec),
        }

    async def unload_model(self, own: str, given: requests.OfModel) -> Answer:
        return (await self._server.unload(own, given.model_id)).body(given.model_id)

    async def forward_backward(self, request: Request) -> Response:
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise RequestRefused(
                UNSUPPORTED, f"send the data as {PROTOBUF}, as SDKs from 0.25.0 on do"
            )
        own, limits = client(request), self._server.served.data
        parsed = await self._bodies.read(
            request, own, lambda body: read_training_request(body, limits)
        )
        accepted = await self._server.train(own, parsed)
        return JSONResponse(accepted.body(parsed.model_id))

    async def change(self, name: str, own: str, given: Any) -> Answer:
        return (await self._server.change(own, name, given)).body(given.model_id or "")

    async def create_sampler(self, own: str, given: requests.CreateSampler) -> Answer:
        sampler = await self._server.create_sampler(own, given)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

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

    async def retrieve_future(self, own: str, given: requests.OfRequest) -> Answer | Response:
        found = await self._server.result(own, given.request_id, WAIT_S)
        if found is None:
            state = "paused_capacity" if self._server.counts.is_full else "active"
            return {"type": "try_again", "request_id": given.request_id, "queue_state": state}
        return Response(found.content, media_type=PROTOBUF if found.media == "protobuf" else JSON)

    async def cancel_future(self, own: str, given: requests.OfRequest) -> Response:
        await self._cancel(own, given.request_id)
        return Response(status_code=204)

    async def weights_info(self, own: str, given: requests.WeightsInfo) -> Answer:
        """Say how a model has to be created that loads saved weights."""
        spec = self._registry.saved(own, given.tinker_path).spec
        return {
            "base_model": self._server.served.base_model,
            **lora(spec),
            "train_unembed": spec.train_unembed,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    def reading(
        self, kind: type[ClientRequest], answer: Callable[[str, Any], Awaitable[Answer | Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of requests of a kind, which `answer` gets with their client."""

        async def handle(request: Request) -> Response:
            own = client(request)
            given = await self._bodies.read(
                request, own, lambda body: parsed(kind, body or b"{}"), INLINE_BYTES
            )
            found = await answer(own, given)
            return found if isinstance(found, Response) else JSONResponse(found)

        return handle


def make_app(
    server: TrainingServer, cancel: Cancel, archives: Archives, further: Sequence[Route] = ()
) -> Starlette:
    """Return the application, with the routes of further APIs."""
    do, rest = Routes(server, cancel), RestRoutes(server, archives)
    posts = {
        "client/config": do.client_config,
        "client/dynamic_config": do.dynamic_config,
        "telemetry": do.telemetry,
        "create_session": do.reading(ClientRequest, do.create_session),
        "session_heartbeat": do.reading(requests.OfSession, do.heartbeat),
        "create_model": do.reading(requests.CreateModel, do.create_model),
        "get_info": do.reading(requests.OfModel, do.get_info),
        "unload_model": do.reading(requests.OfModel, do.unload_model),
        "forward_backward": do.forward_backward,
        "create_sampling_session": do.reading(requests.CreateSampler, do.create_sampler),
        "asample": do.asample,
        "retrieve_future": do.reading(requests.OfRequest, do.retrieve_future),
        "cancel_future": do.reading(requests.OfRequest, do.cancel_future),
        "weights_info": do.reading(requests.WeightsInfo, do.weights_info),
    }
    for name, kind in requests.CHANGES.items():
        posts[name] = do.reading(kind, partial(do.change, name))
    gets = {
        "healthz": do.healthz,
        "get_server_capabilities": do.capabilities,
        "metrics": do.metrics,
    }
    routes = [Route(f"/api/v1/{path}", call, methods=["POST"]) for path, call in posts.items()]
    routes += [Route(f"/api/v1/{path}", call) for path, call in gets.items()]
    routes += [*rest.routes(), *further]
    return Starlette(routes=routes, exception_handlers=HANDLERS)
