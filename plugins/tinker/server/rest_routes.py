"""What clients read and change of their sessions, samplers, training runs and saved weights.

GET    /api/v1/sessions sessions/{id} samplers/{id} training_runs training_runs/{id} checkpoints
GET    /api/v1/training_runs/{id}/checkpoints      archives/{signed}
GET    /api/v1/training_runs/{id}/checkpoints/{kind}/{name}/archive
DELETE /api/v1/training_runs/{id}/checkpoints/{kind}/{name}      PUT the same with /ttl
POST   /api/v1/sessions/{id}/finish

Lists are read in parts, by the `offset` and `limit` of a request. Saved weights are downloaded as a
tar of adapters as peft loads them, or of all weights, from an address that is signed for a quarter
of an hour, so that tools without the client's key can get it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import secrets
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.records import Model, SamplerSource, Saved
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.server import ServedModel, TrainingServer
from composer_mesh.services.web.bodies import INLINE_BYTES
from composer_mesh.services.web.errors import NOT_FOUND, RequestRefused


def capabilities(served: ServedModel) -> Mapping[str, Any]:
    """Return the one model that is served."""
    about = {
        "model_name": served.base_model,
        "max_context_length": served.data.context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [about]}


def model_info(model: Model, served: ServedModel) -> Mapping[str, Any]:
    """Return what `get_info` tells of a model."""
    about = {"model_name": served.base_model, "tokenizer_id": served.tokenizer or None}
    return {
        "type": "get_info",
        "model_data": about,
        "model_id": model.id,
        "model_name": served.base_model,
        **_lora(model.spec.rank),
    }


def _lora(rank: int) -> Mapping[str, Any]:
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def weights_info(saved: Saved, served: ServedModel) -> Mapping[str, Any]:
    """Return how a model has to be created that loads saved weights."""
    spec = saved.spec
    return {
        "base_model": served.base_model,
        **_lora(spec.rank),
        "train_unembed": spec.train_unembed,
        "train_mlp": spec.train_mlp,
        "train_attn": spec.train_attn,
    }


def sampler_info(found: SamplerSource, served: ServedModel) -> Mapping[str, Any]:
    """Return what a sampler draws from."""
    return {
        "sampler_id": found.id,
        "base_model": served.base_model,
        "model_path": found.path or None,
    }


def session_info(name: str, client: str, registry: Registry) -> Mapping[str, Any]:
    """Return the models and samplers of a session."""
    models = [one.id for one in registry.models(client) if one.session == name]
    samplers = [one.id for one in registry.samplers() if one.session == name]
    return {"training_run_ids": models, "sampler_ids": samplers}


def checkpoint_info(saved: Saved) -> Mapping[str, Any]:
    """Return saved weights as lists show them."""
    return {
        "checkpoint_id": saved.checkpoint_id,
        "checkpoint_type": saved.kind,
        "time": _time(saved.created),
        "tinker_path": saved.path,
        "size_bytes": saved.bytes,
        "public": False,
        "user_metadata": json.loads(saved.metadata) if saved.metadata else None,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def training_run_info(
    model: Model, saved: Sequence[Saved], served: ServedModel
) -> Mapping[str, Any]:
    """Return a model as lists show it, with what it saved last."""
    last = {kind: next((one for one in saved if one.kind == kind), None) for kind in _KINDS}
    training, sampling = last["training"], last["sampler"]
    return {
        "training_run_id": model.id,
        "base_model": served.base_model,
        "model_owner": model.client,
        **_lora(model.spec.rank),
        "corrupted": False,
        "last_request_time": _time(model.used),
        "last_checkpoint": None if training is None else checkpoint_info(training),
        "last_sampler_checkpoint": None if sampling is None else checkpoint_info(sampling),
        "user_metadata": {key: str(value) for key, value in json.loads(model.metadata).items()},
    }


_KINDS = ("training", "sampler")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


MOST_LISTED = 1000


def page_of(request: Request) -> tuple[int, int]:
    """Return the first place of a list and the one after the last; raises `HTTPException`."""
    first = _number(request, "offset", 0)
    return first, first + min(MOST_LISTED, _number(request, "limit", 100))


def cursor(first: int, until: int, total: int) -> Mapping[str, int]:
    """Return where a part is in its list, as clients read it."""
    return {"offset": first, "limit": until - first, "total_count": total}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} is {text[:40]!r}: send a number from 0")
    return int(text)


VALID_S = 900.0

Files = Callable[[Path], dict[str, bytes]]
"""Returns the files of an archive, by name, from a file with weights."""


class Archives:
    """Signs addresses with a key of this process, and answers them."""

    def __init__(self, folder: Path, files: Files, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._files, self._clock = folder, files, clock
        self._key = secrets.token_bytes(32)

    def url(self, saved: Saved, base_url: str) -> tuple[str, datetime]:
        """Return an address of saved weights, and until when it is valid."""
        expires = self._clock() + VALID_S
        content = json.dumps([saved.file, expires]).encode()
        signed = base64.urlsafe_b64encode(self._sign(content) + content).decode()
        return f"{base_url}api/v1/archives/{signed}", datetime.fromtimestamp(expires, UTC)

    async def response(self, signed: str) -> Response:
        """Return the archive of a signed address; raises `RequestRefused`."""
        file = self._opened(signed)
        content = await asyncio.to_thread(self._archive, self._folder / file)
        headers = {"content-disposition": 'attachment; filename="checkpoint.tar"'}
        return Response(content, media_type="application/x-tar", headers=headers)

    def _opened(self, signed: str) -> str:
        gone = RequestRefused(
            NOT_FOUND, "this address is not valid, or no longer: ask for another one"
        )
        try:
            content = base64.urlsafe_b64decode(signed.encode())
        except ValueError:
            raise gone from None
        signature, rest = content[:32], content[32:]
        if not hmac.compare_digest(signature, self._sign(rest)):
            raise gone
        file, expires = json.loads(rest)
        if expires < self._clock():
            raise gone
        return str(file)

    def _sign(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)

    def _archive(self, path: Path) -> bytes:
        try:
            files = self._files(path)
        except (OSError, ValueError):
            raise RequestRefused(NOT_FOUND, "these weights are gone: save them again") from None
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return whole.getvalue()


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
        return JSONResponse(sampler_info(found, self._server.served))

    async def sessions(self, request: Request) -> Response:
        own = self._registry.sessions(client(request))
        first, until = page_of(request)
        return JSONResponse({"sessions": [one.id for one in own[first:until]]})

    async def session(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._registry.session(client(request), name)
        return JSONResponse(session_info(name, client(request), self._registry))

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
        return training_run_info(model, saved, self._server.served)

    async def checkpoints(self, request: Request) -> Response:
        model_id = request.path_params.get("id")
        if model_id is not None:
            self._registry.model(client(request), model_id)
        own = self._registry.all_saved(client(request), model_id)
        first, until = page_of(request)
        shown = [checkpoint_info(one) for one in own[first:until]]
        return JSONResponse({"checkpoints": shown, "cursor": cursor(first, until, len(own))})

    async def delete_checkpoint(self, request: Request) -> Response:
        await self._server.delete_saved(client(request), _saved_path(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        parsed = await self._bodies.read(
            request,
            client(request),
            lambda body: requests.parsed(requests.TimeToLive, body),
            INLINE_BYTES,
        )
        saved = self._registry.saved(client(request), _saved_path(request))
        await self._registry.set_ttl(saved, parsed.ttl_seconds)
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
