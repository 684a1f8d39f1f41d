"""A training server in this process: the real one on HTTP, with a trainer that only keeps books."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.models.messages import (
    CHANGES,
    BatchShape,
    ModelSpec,
    ScoreRequest,
    Scores,
    TrainCall,
    TrainResult,
)
from composer_mesh.plugins.tinker.server.access import ClientAccess
from composer_mesh.plugins.tinker.server.app import make_app
from composer_mesh.plugins.tinker.server.backend import BackendLost
from composer_mesh.plugins.tinker.server.openai_api import OpenAiRoutes
from composer_mesh.plugins.tinker.server.rest_routes import Archives
from composer_mesh.plugins.tinker.server.results import ForwardBackwardRequest
from composer_mesh.plugins.tinker.server.server import ServedModel
from composer_mesh.plugins.tinker.server.server_tasks import ServerTasks, opened_server
from composer_mesh.plugins.tinker.server.training_data import DataLimits
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

VOCABULARY, CONTEXT = 100, 32
PROTOBUF = "application/x-protobuf"


class BookkeepingTrainer:
    """Models are lists of the changes that were made to them; `die` loses them all."""

    def __init__(self) -> None:
        self.models: dict[str, list[str]] = {}
        self.executed = 0
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        """Gets the size of each group when its execution begins."""
        self.dies_in: list[str] = []
        """Endpoints in which it dies next, after they did their work."""
        self.gate = asyncio.Event()
        self.gate.set()

    def die(self) -> None:
        self.models.clear()

    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        self.models[model] = [] if path is None else _read(path)
        self._dies("open")
        return len(self.models[model])

    async def close(self, models: Sequence[str]) -> None:
        for model in models:
            del self.models[model]
        self._dies("close")

    async def execute(self, calls: Sequence[TrainCall]) -> list[TrainResult]:
        self.begun.put_nowait(len(calls))
        await self.gate.wait()
        found = [self._one(call) for call in calls]
        self.executed += len(calls)
        self._dies("execute")
        return found

    def _one(self, call: TrainCall) -> TrainResult:
        changes = self.models[call.model]
        if call.kind == "save":
            self._write(Path(call.path), changes)
            return TrainResult(metrics={"bytes": 1.0})
        if call.kind == "load_weights":
            changes[:] = _read(Path(call.path))
        if call.kind in CHANGES:
            changes.append(content_of(call))
        logprobs = tuple(
            np.zeros(one.inputs["target_tokens"].shape, np.float32) for one in call.data
        )
        metrics = {"loss:sum": float(len(changes))} if call.data else {"steps": float(len(changes))}
        return TrainResult(logprobs, metrics, BatchShape(1, 0, 1, 8) if call.data else None)

    async def save(self, model: str, path: Path) -> int:
        self._write(path, self.models[model])
        self._dies("save")
        return 1

    def _write(self, path: Path, changes: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"changes": changes}))

    def _dies(self, endpoint: str) -> None:
        if endpoint in self.dies_in:
            self.dies_in.remove(endpoint)
            self.die()
            raise BackendLost(f"it died in {endpoint}")


def _read(path: Path) -> list[str]:
    found: list[str] = json.loads(path.read_text())["changes"]
    return found


def content_of(call: TrainCall) -> str:
    """Return a digest of what a call changes."""
    arrays = [one.tokens.tobytes() + one.inputs["target_tokens"].tobytes() for one in call.data]
    return hashlib.sha256(b"".join(arrays) + f"{call.kind}{call.adam}".encode()).hexdigest()[:12]


class EchoSamplers:
    """Each sample repeats the last token of its prompt, or names its snapshot by its length."""

    def __init__(self) -> None:
        self.lost = 0
        self.asked: list[GenerationRequest] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        """Gets the id of each call's first request when it begins."""
        self.snapshots: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def sample(
        self, snapshot: str, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        self.begun.put_nowait(requests[0].request_id)
        await self.gate.wait()
        self.asked += requests
        self.snapshots.append(snapshot)
        if self.lost:
            self.lost -= 1
            raise BackendLost("it died")
        return [
            GenerationResult(
                one.request_id,
                [one.prompt_ids[-1]] * one.max_new_tokens,
                [-0.5] * one.max_new_tokens,
                [0] * one.max_new_tokens,
                "length",
            )
            for one in requests
        ]

    async def score(
        self, snapshot: str, sequences: Sequence[list[int]], request: ScoreRequest
    ) -> list[Scores]:
        found = []
        for ids in sequences:
            count = len(ids) - 1
            top = np.zeros((count, request.top_k), np.int32) if request.top_k else None
            logprobs = None if top is None else top.astype(np.float32)
            targets = None if request.targets is None else request.targets.astype(np.float32)
            found.append(Scores(np.full(count, -1.0, np.float32), top, logprobs, targets))
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        del request_ids


class World:
    """One run of a server on a folder, and clients of it."""

    def __init__(self, tasks: ServerTasks, trainer: Any, samplers: Any, app: Any) -> None:
        self.tasks, self.trainer, self.samplers, self._app = tasks, trainer, samplers, app
        self.registry, self.commits = tasks.server.registry, tasks.server.commits

    def openai(self, key: str = "tml-one") -> openai.AsyncOpenAI:
        """Return a client of OpenAI's own."""
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self._app))
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0
        )

    def client(self, key: str = "tml-one") -> Client:
        transport = httpx.ASGITransport(self._app)
        http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers={"X-API-Key": key}
        )
        return Client(http)


@asynccontextmanager
async def served(
    folder: Path,
    limits: ServeConfig | None = None,
    keys: Sequence[str] = (),
    trainer: Any = None,
    runs: bool = True,
    format: CaptureFormat | None = None,
    adapts_head: bool = True,
    samplers: Any = None,
) -> AsyncIterator[World]:
    """Serve from a folder for a block, at whose end everything is as after a kill.

    With a chat format OpenAI's API is served too, and the context is long enough for it.
    """
    data = DataLimits(VOCABULARY, CONTEXT, 8, 5)
    if format is not None:
        data = DataLimits(format.vocabulary, 20 * CONTEXT, 8, 5)
    base = ServedModel("base", "", data, limits or ServeConfig(), (1,), _text, 1000, 4, adapts_head)
    trainer, samplers = trainer or BookkeepingTrainer(), samplers or EchoSamplers()
    async with opened_server(base, folder) as server:
        tasks = ServerTasks(server, trainer, samplers)
        await server.recover()
        archives = Archives(folder, lambda path: {"weights": path.read_bytes()})
        cancel = tasks.sampling.cancel
        more = [] if format is None else OpenAiRoutes(server, cancel, format).routes()
        app = ClientAccess(make_app(server, cancel, archives, more), ["localhost"], keys)
        running = [asyncio.create_task(tasks.run())] if runs else []
        try:
            yield World(tasks, trainer, samplers, app)
            if server.ended.is_set():
                await asyncio.gather(*running)
        finally:
            await cancel_and_wait(running)


def _text(ids: list[int]) -> str:
    return "".join(chr(97 + one % 26) for one in ids)


class Client:
    """What an SDK sends, without one."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.session = ""

    async def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        answer = await self.http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json() if answer.content else None

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.http.get(f"/api/v1/{path}")
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    async def model(self, number: int = 0, rank: int = 4, base: str = "base") -> str:
        if not self.session:
            self.session = (await self.post("create_session"))["session_id"]
        accepted = await self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model=base,
            lora_config={"rank": rank, "seed": 1},
        )
        model: str = (await self.result(accepted))["model_id"]
        return model

    async def train(
        self, model: str, seq: int, seed: int = 0, status: int = 200, **more: Any
    ) -> Any:
        return await self.send(training_body(model, seq, seed, **more), status)

    async def send(self, body: bytes, status: int = 200) -> Any:
        headers = {"content-type": PROTOBUF}
        answer = await self.http.post("/api/v1/forward_backward", content=body, headers=headers)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer.json()

    async def step(self, model: str, seq: int, lr: float = 0.1) -> Any:
        adam = {"learning_rate": lr}
        return await self.post("optim_step", model_id=model, seq_id=seq, adam_params=adam)

    async def raw(self, accepted: Any, status: int = 200) -> httpx.Response:
        body = {"request_id": accepted["request_id"]}
        answer = await self.http.post("/api/v1/retrieve_future", json=body)
        assert answer.status_code == status, (answer.status_code, answer.text)
        return answer

    async def result(self, accepted: Any) -> Any:
        return (await self.raw(accepted)).json()


def training_body(
    model: str,
    seq: int,
    seed: int = 0,
    loss: str = "cross_entropy",
    forward: bool = False,
    rows: int = 1,
    length: int = 6,
) -> bytes:
    """Return a request with sequences of random tokens."""
    rng = np.random.default_rng(seed)
    message = ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward)
    for _ in range(rows):
        datum = message.data.add()
        ids, wanted = (rng.integers(2, 99, length) for _ in range(2))
        datum.model_input.add().encoded_text.tokens = ids.astype("<i4").tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = wanted.astype("<i8").tobytes(), 2
        targets.shape.append(length)
    return bytes(message.SerializeToString())


async def named_snapshot(client: Client, model: str) -> str:
    asked = await client.post("save_weights_for_sampler", model_id=model, path="snap")
    path: str = (await client.result(asked))["path"]
    return path
