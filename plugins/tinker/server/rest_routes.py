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
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.access import client
from composer_mesh.plugins.tinker.server.records import ClientSession, Model, Saved
from composer_mesh.plugins.tinker.server.server import TrainingServer
from composer_mesh.services.web.bodies import INLINE_BYTES
from composer_mesh.services.web.errors import NOT_FOUND, RequestRefused

T = TypeVar("T")


def lora(spec: ModelSpec) -> Mapping[str, Any]:
    """Return what clients read of adapters, of which a model of all weights has none."""
    return {"is_lora": spec.rank > 0, "lora_rank": spec.rank or None}


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


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


MOST_LISTED = 1000


def page_of(request: Request, whole: Sequence[T]) -> tuple[Sequence[T], Mapping[str, int]]:
    """Return the part of a list that is requested, and where it is; raises `HTTPException`."""
    first, most = _number(request, "offset", 0), min(MOST_LISTED, _number(request, "limit", 100))
    return whole[first : first + most], {
        "offset": first,
        "limit": most,
        "total_count": len(whole),
    }


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

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._key = secrets.token_bytes(32)

    def url(self, saved: Saved, base_url: str) -> tuple[str, datetime]:
        """Return an address of saved weights, and until when it is valid."""
        expires = time.time() + VALID_S
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
        if expires < time.time():
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
        about = {"sampler_id": found.id, "base_model": self._server.served.base_model}
        return JSONResponse({**about, "model_path": found.path or None})

    async def sessions(self, request: Request) -> Response:
        held = self._registry.sessions.values()
        own = [one.id for one in sorted(held, key=_newest) if one.client == client(request)]
        return JSONResponse({"sessions": page_of(request, own)[0]})

    async def session(self, request: Request) -> Response:
        name, registry = request.path_params["id"], self._registry
        registry.session(client(request), name)
        models = [one.id for one in registry.models_of(client(request)) if one.session == name]
        samplers = [one.id for one in registry.samplers.values() if one.session == name]
        return JSONResponse({"training_run_ids": models, "sampler_ids": samplers})

    async def finish_session(self, request: Request) -> Response:
        """Free the session of a program that has ended, and its samplers; its models stay."""
        await self._bodies.read(request, client(request), len)
        ended = self._registry.session(client(request), request.path_params["id"])
        await self._registry.end([ended.id])
        return Response(status_code=204)

    async def training_runs(self, request: Request) -> Response:
        shown, cursor = page_of(request, self._registry.models_of(client(request)))
        runs = [self._run(one) for one in shown]
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        model = self._registry.model(client(request), request.path_params["id"])
        return JSONResponse(self._run(model))

    def _run(self, model: Model) -> Mapping[str, Any]:
        """Return a model as lists show it, with what it saved last."""
        last: dict[str, Any] = {}
        for one in reversed(self._registry.all_saved(model.client, model.id)):
            last[one.kind] = checkpoint_info(one)
        return {
            "training_run_id": model.id,
            "base_model": self._server.served.base_model,
            "model_owner": model.client,
            **lora(model.spec),
            "corrupted": False,
            "last_request_time": _time(model.used),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": {key: str(value) for key, value in json.loads(model.metadata).items()},
        }

    async def checkpoints(self, request: Request) -> Response:
        model_id = request.path_params.get("id")
        if model_id is not None:
            self._registry.model(client(request), model_id)
        shown, cursor = page_of(request, self._registry.all_saved(client(request), model_id))
        checkpoints = [checkpoint_info(one) for one in shown]
        return JSONResponse({"checkpoints": checkpoints, "cursor": cursor})

    async def delete_checkpoint(self, request: Request) -> Response:
        await self._registry.delete_saved(self._saved(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        parsed = await self._bodies.read(
            request,
            client(request),
            lambda body: requests.parsed(requests.TimeToLive, body),
            INLINE_BYTES,
        )
        await self._registry.set_ttl(self._saved(request), parsed.ttl_seconds)
        return Response(status_code=204)

    async def archive(self, request: Request) -> Response:
        url, expires = self._archives.url(self._saved(request), str(request.base_url))
        return JSONResponse({"url": url, "expires": expires.isoformat()})

    async def download(self, request: Request) -> Response:
        return await self._archives.response(request.path_params["signed"])

    def _saved(self, request: Request) -> Saved:
        """Return the saved weights of an address; raises `RequestRefused`."""
        path = "tinker://{id}/{kind}/{name}".format(**request.path_params)
        return self._registry.saved(client(request), path)


def _newest(one: ClientSession) -> float:
    return -one.created
