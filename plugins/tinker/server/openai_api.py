"""Chat completions and completions by OpenAI's API, from the base model and from saved weights.

POST /v1/chat/completions completions      GET /v1/models      the same under /oai/api/v1

A request is an episode of one turn of the agent endpoint's, which reads it and writes its answer.
Its samples are operations like those of `asample`: in the log, in the fair queue, within limits.
`model` is the base model's name, or the path of weights that the client saved.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Exchange,
    NoRoomForAnswer,
    TooManyTurns,
)
from composer_mesh.actors.rollout_workers.openai_chat import ChatAnswer, CompletionAnswer
from composer_mesh.actors.rollout_workers.openai_wire import ReadRequest, WireAnswer, bad_request
from composer_mesh.configs.base import Temperature, TopP
from composer_mesh.configs.validation import validated_json
from composer_mesh.mesh.json_server import Refusal
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.records import SCHEME
from composer_mesh.plugins.tinker.server.results import STOP, Result, SampleResponse
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult, Truncation
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import StopReason
from composer_mesh.services.web.errors import RequestRefused

PREFIXES = ("/v1", "/oai/api/v1")
WAIT_S = 3600.0
"""Seconds that a request waits for its samples."""
APIS: dict[str, ReadRequest] = {
    "chat/completions": ChatAnswer.read,
    "completions": CompletionAnswer.read,
}
Cancel = Callable[[str, str], Awaitable[None]]


class SamplingParameters(BaseModel):
    """What a request says of sampling; the rest is read by its API."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=500)]
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: requests.TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=0)] | None = None
    seed: requests.Seed | None = None

    def sampling(self, context: int) -> Sampling:
        """Return the parameters as an episode takes them; without a seed, a random one."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        temperature = 1.0 if self.temperature is None else self.temperature
        truncation = Truncation(self.top_p or 1.0, max(0, self.top_k or 0))
        return Sampling(temperature, context, context, seed, truncation=truncation)


class SampleFailed(Exception):
    """An operation whose answer is an error: its text, and whether the server is to blame."""

    def __init__(self, text: str, category: str) -> None:
        super().__init__(text, category)


class SampledByOperations:
    """Generation for one request: each answer is an operation of its client."""

    def __init__(
        self, server: TrainingServer, cancel: Cancel, client: str, where: dict[str, str]
    ) -> None:
        self._server, self._cancel, self._client, self._where = server, cancel, client, where

    async def generate(self, request: GenerationRequest, group: str, /) -> GenerationResult:
        """Sample one answer; raises `RequestRefused` and `SampleFailed`."""
        del group
        settings = requests.SamplingSettings(
            max_tokens=request.max_new_tokens,
            seed=request.seed,
            temperature=request.temperature,
            top_p=request.truncation.top_p,
            top_k=request.truncation.top_k or -1,
        )
        prompt = requests.Prompt(chunks=[requests.TextChunk(tokens=request.prompt_ids)])
        sample = requests.SampleRequest(prompt=prompt, sampling_params=settings, **self._where)
        accepted = await self._server.sample(self._client, sample)
        try:
            found = await self._server.result(self._client, accepted.request_id, WAIT_S)
        except asyncio.CancelledError:
            await self._cancel(self._client, accepted.request_id)
            raise
        return _sequence(found, request.request_id)


def _sequence(found: Result | None, request_id: str) -> GenerationResult:
    """Return the one sample of an answer."""
    if found is None:
        raise SampleFailed(f"no answer within {WAIT_S:g} s", "server")
    if found.failed:
        error = json.loads(found.content)
        raise SampleFailed(error["error"], error["category"])
    sequence = SampleResponse.FromString(found.content).sequences[0]
    ids = np.frombuffer(sequence.tokens, "<i4").tolist()
    logprobs = np.frombuffer(sequence.logprobs, "<f4").tolist()
    reason: StopReason = "stop" if sequence.stop_reason == STOP else "length"
    return GenerationResult(request_id, ids, logprobs, [0] * len(ids), reason)


class OpenAiRoutes:
    """The handlers; `format` is the chat format of the base model, and so of all weights."""

    def __init__(self, server: TrainingServer, cancel: Cancel, format: CaptureFormat) -> None:
        self._server, self._cancel, self._format = server, cancel, format

    def routes(self) -> list[Route]:
        """Return the routes."""
        found = []
        for prefix in PREFIXES:
            found.append(Route(f"{prefix}/models", self._caught(self._models)))
            for name, read in APIS.items():
                call = self._caught(self._answering(read))
                found.append(Route(f"{prefix}/{name}", call, methods=["POST"]))
        return found

    async def _models(self, request: Request) -> Response:
        saved = self._server.registry.all_saved(client(request))
        paths = [one.path for one in saved if one.kind == "sampler"]
        about = {"object": "model", "created": 0, "owned_by": "composer-mesh"}
        longest = {"max_model_len": self._server.served.data.context}
        names = [self._server.served.base_model, *paths]
        data = [{"id": name, **about, **longest} for name in names]
        return JSONResponse({"object": "list", "data": data})

    def _answering(self, read: ReadRequest) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            served, own = self._server.served, client(request)
            async with self._server.bodies.body(request, own) as body:
                parameters = await self._server.bodies.made(_parameters, body)
                generation = SampledByOperations(
                    self._server, self._cancel, own, self._where(own, parameters.model)
                )
                sampling = parameters.sampling(served.data.context)
                sample = Sample(Episode("", "heldout", 0), 0, 0, sampling)
                episode = AgentEpisode(self._format, generation, sample, sampling, 0.0)
                reading = await self._server.bodies.made(read, body, episode, parameters.model)
            try:
                exchange = await _while_connected(request, episode.answer(reading.ask, b"", False))
                return _written(reading, exchange)
            finally:
                await episode.close()

        return answer

    def _where(self, client: str, model: str) -> dict[str, str]:
        """What a sample is drawn from; raises `RequestRefused` for what is not this client's."""
        if not model.startswith(SCHEME):
            return {"base_model": model}
        self._server.registry.saved(client, model)
        return {"model_path": model}

    def _caught(
        self, call: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await call(request)
            except REFUSED as error:
                refusal = _refusal_of(error)
                return JSONResponse(refusal.body(), refusal.status)

        return handle


REFUSED = (Refusal, RequestRefused, SampleFailed, NoRoomForAnswer, UnusableMessages, TooManyTurns)


def _refusal_of(error: Exception) -> Refusal:
    """Return an error as OpenAI's API has it."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestRefused):
        return Refusal(HTTPStatus(error.status), error.text)
    if isinstance(error, SampleFailed):
        text, category = error.args
        own = HTTPStatus.BAD_REQUEST if category == "user" else HTTPStatus.BAD_GATEWAY
        return Refusal(own, text)
    code = "context_length_exceeded" if isinstance(error, NoRoomForAnswer) else None
    return bad_request(str(error), None, code)


def _parameters(body: bytes) -> SamplingParameters:
    try:
        return validated_json(SamplingParameters, body)
    except ValueError as error:
        raise bad_request(short_reason(error)) from None


def _written(reading: WireAnswer, exchange: Exchange) -> Response:
    if reading.stream:
        return StreamingResponse(reading.events(exchange), media_type="text/event-stream")
    return JSONResponse(reading.reply(exchange))


async def _while_connected(request: Request, answering: Coroutine[Any, Any, Exchange]) -> Exchange:
    """Return the answers; those of a client that goes before are given up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    asking, leaving = asyncio.create_task(answering), asyncio.create_task(gone())
    try:
        await asyncio.wait([asking, leaving], return_when="FIRST_COMPLETED")
        if not asking.done():
            raise Refusal(HTTPStatus.BAD_REQUEST, "the client has closed its connection")
        return asking.result()
    finally:
        await cancel_and_wait([asking, leaving])
