"""A training server without HTTP: accepts operations of clients, and gives their answers.

    accept: check -> log -> queue          answer: lane -> log -> whoever waits

Every method takes the client that asks, and finds only what is that client's.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.fair_queue import OpenCounts, SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.records import (
    Accepted,
    Executing,
    Operation,
    OperationRequest,
    SamplerSource,
    saved_path,
)
from composer_mesh.plugins.tinker.server.registry import REMEMBERED, Registry
from composer_mesh.plugins.tinker.server.requests import Payloads, check_sample
from composer_mesh.plugins.tinker.server.results import RecentAnswers, Result, failure, json_result
from composer_mesh.plugins.tinker.server.training_data import DataLimits, TrainingRequest
from composer_mesh.services.web.bodies import MOST_VALUES, Bodies
from composer_mesh.services.web.errors import GONE, TOO_MANY, RequestRefused, bad, unknown

UNLOADED = failure("its model was unloaded", "user")


@dataclass(frozen=True)
class ServedModel:
    """What is served: the base model's name, its bounds, and how much is computed at once."""

    base_model: str
    tokenizer: str
    data: DataLimits
    limits: ServeConfig
    stop_ids: tuple[int, ...]
    text_of: Callable[[list[int]], str]
    tokens_at_once: int
    """Tokens of a group of operations."""
    samples_at_once: int
    adapts_head: bool = True
    """Whether samplers can serve adapters in the model's head."""


class TrainingServer:
    """Sessions, models and operations of all clients."""

    def __init__(
        self,
        served: ServedModel,
        folder: Path,
        commits: GroupCommit,
        found: log.LoggedRecords,
        executing: Executing,
    ) -> None:
        self.served, self.folder, limits = served, folder, served.limits
        self.commits, self.executing = commits, executing
        self.registry = Registry(commits, found, limits)
        self.training, self.samples = TrainingQueue(), SampleQueue()
        self.training_arrived, self.sample_arrived = asyncio.Event(), asyncio.Event()
        """Set where the queue of a lane has changed."""
        self.payloads = Payloads(commits, served.data)
        self._open: dict[str, Operation] = {}
        self._recent = RecentAnswers()
        self.counts = OpenCounts(limits)
        most, tokens = int(limits.max_request_mb * 1e6), served.data.context * limits.max_top_k
        self.bodies = Bodies(most, 2 * most, 8 * most, MOST_VALUES + tokens)
        self.ended = asyncio.Event()
        """Set where no operation will be answered any more."""

    def open_numbers(self) -> set[int]:
        """Return the numbers of the operations that are not answered."""
        return {one.number for one in self._open.values()}

    def metrics(self) -> dict[str, Any]:
        """Return counts for operators."""
        models = self.registry.models.values()
        return {
            "open_operations": self.counts.total,
            "open_bytes": self.counts.bytes,
            "waiting_training": len(self.training),
            "waiting_samples": len(self.samples),
            "models": sum(not one.unloaded for one in models),
            "changes": sum(one.position for one in models),
            "optimizer_steps": sum(one.steps for one in models),
        }

    async def recover(self) -> int:
        """Queue the unanswered operations of the log again; return how many there were.

        What was being executed when the last process was killed has one attempt more.
        """
        named = {one.file for one in self.registry.models.values()}
        await asyncio.to_thread(_delete_abandoned, self.folder, named)
        await self.commits.run(partial(log.count_attempts, numbers=self.executing.left))
        self.executing.clear()
        seqs = await self.commits.run(log.next_seqs)
        for model in self.registry.models.values():
            if not model.unloaded:
                self.training.begin(model.id, model.client, seqs.get(model.id, 1))
        found = await self.commits.run(log.queued)
        for one in found:
            self.counts.add(one.request.client, one.size, checked=False)
            self._enter(one)
        return len(found)

    async def create_model(self, client: str, request: requests.CreateModel) -> Accepted:
        """Create a model of adapters, or of all weights where the server trains these."""
        self._check_base(request.base_model)
        optimizer = (request.optimizer_config or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise bad(f"optimizer_config.type is {str(optimizer)[:40]!r}: choose 'adamw'")
        spec = self._spec(request.lora_config)
        return await self._create(
            client, request.session_id, request.model_seq_id, spec, request.user_metadata, request
        )

    def _spec(self, lora: requests.LoraSettings | None) -> ModelSpec:
        limits = self.served.limits
        if limits.full_weights:
            # SDKs have no way to ask for it: they send a rank that does not apply.
            return ModelSpec(rank=0)
        if lora is None:
            raise bad("lora_config is missing, and this server trains adapters: send it")
        if lora.rank > limits.max_rank:
            raise bad(f"rank is {lora.rank}: send one of at most {limits.max_rank}")
        if lora.train_unembed and not self.served.adapts_head:
            raise bad(
                "train_unembed is true, and the vLLM of this server has no adapters in the head: "
                "create the model with train_unembed=False"
            )
        seed = secrets.randbits(31) if lora.seed is None else lora.seed & 0x7FFFFFFFFFFFFFFF
        return ModelSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)

    async def _create(
        self,
        client: str,
        session: str,
        seq: int,
        spec: ModelSpec,
        metadata: dict[str, Any] | None,
        request: requests.ClientRequest,
        first_seq: int = 1,
    ) -> Accepted:
        model = self.registry.new_model(client, session, seq, spec, json.dumps(metadata or {}))
        if model.id not in self.registry.models:
            self._check_models(client)
        requested = OperationRequest(
            client, "create_model", f"{session}:train", seq, request.canonical()
        )
        answer = json_result(type="create_model", model_id=model.id)

        def enter(rows: Any) -> Accepted:
            accepted = log.accept(rows, requested)
            if accepted.is_new:
                log.put(rows, model)
                log.finish(rows, [log.Finished(accepted.number, answer, time.time())])
            return accepted

        accepted = await self.commits.run(enter)
        if accepted.is_new:
            self.registry.set_model(model)
            self.training.begin(model.id, client, first_seq)
            self._recent.add(accepted.request_id, client, answer)
        return accepted

    def _check_models(self, client: str) -> None:
        limits, models = self.served.limits, self.registry.models.values()
        alive = [one for one in models if not one.unloaded]
        own = sum(one.client == client for one in alive)
        remembered = sum(one.client == client for one in models)
        if remembered >= REMEMBERED * limits.max_models_per_client:
            raise RequestRefused(
                TOO_MANY,
                f"you have {remembered} models, of which {remembered - own} are unloaded: those "
                f"without saved weights are forgotten after {limits.result_s:g} s, wait for that",
            )
        if limits.full_weights and alive:
            raise bad("this server trains all weights of one model, and there is one: unload it")
        if own >= limits.max_models_per_client or len(alive) >= limits.max_models:
            raise bad(
                f"you have {own} models and all clients {len(alive)}, of at most "
                f"{limits.max_models_per_client} and {limits.max_models}: unload some"
            )

    def _check_base(self, name: str | None) -> None:
        if name != self.served.base_model:
            raise bad(f"base_model is {str(name)[:100]!r}: choose {self.served.base_model!r}")

    async def train(self, client: str, request: TrainingRequest) -> Accepted:
        """Accept a forward, or a forward and backward."""
        kind = "forward" if request.forward_only else "forward_backward"
        seq = request.seq_id or None
        return await self._of_model(
            client, request.model_id, kind, seq, request.canonical, request, request.tokens
        )

    async def change(self, client: str, kind: Any, request: Any) -> Accepted:
        """Accept an `optim_step`, or an operation that saves or loads weights."""
        if kind == "load_weights":
            self.registry.saved(client, request.path)
            if request.model_id is None:
                return await self._create_from(client, request)
        elif kind != "optim_step" and request.path is not None:
            saved_path(request.model_id, "training", request.path)
        model, seq, body = request.model_id, request.seq_id, request.canonical()
        return await self._of_model(client, model, kind, seq, body, request, 1, request.identity())

    async def _create_from(self, client: str, request: requests.LoadWeights) -> Accepted:
        """Create a model like that of saved weights, and load them as its first operation."""
        assert request.session_id is not None
        assert request.model_seq_id is not None
        saved = self.registry.saved(client, request.path)
        session, seq = request.session_id, request.model_seq_id
        about = request.user_metadata
        await self._create(client, session, seq, saved.spec, about, request, first_seq=0)
        name, body = f"{session}:train:{seq}", request.canonical()
        return await self._of_model(client, name, "load_weights", 0, body, request, 1)

    async def _of_model(
        self,
        client: str,
        name: str,
        kind: Any,
        seq: int | None,
        body: bytes,
        payload: Any,
        cost: int,
        identity: bytes | None = None,
    ) -> Accepted:
        model = self.registry.model(client, name)
        if model.unloaded:
            raise bad(f"model {name} was unloaded: create another one")
        await self.registry.touch(client, model.session)
        requested = OperationRequest(client, kind, model.id, seq, body, model.id, cost, identity)
        check = partial(self.training.check_seq, model.id, seq)
        return await self._accept(requested, payload, check)

    async def sample(self, client: str, request: requests.SampleRequest) -> Accepted:
        """Accept a request for samples, for log-probs of a prompt, or both."""
        check_sample(request, self.served.data, self.served.limits)
        scope = ""
        if request.sampling_session_id is not None:
            sampler = self.registry.sampler(client, request.sampling_session_id)
            await self.registry.touch(client, sampler.session)
            scope = f"{sampler.id}:sample"
        elif request.model_path is not None:
            self.registry.saved(client, request.model_path)
        else:
            self._check_base(request.base_model)
        seq = request.seq_id if scope else None
        most = request.sampling_params.max_tokens or self.served.data.context
        cost = len(request.prompt.ids) + request.num_samples * most
        requested = OperationRequest(client, "sample", scope, seq, request.canonical(), "", cost)
        return await self._accept(requested, request, lambda: None)

    async def _accept(
        self, requested: OperationRequest, payload: Any, check_new: Callable[[], None]
    ) -> Accepted:
        """Log and queue an operation, unless it is known already."""
        size = len(requested.body)
        self.counts.add(requested.client, size)
        try:

            def enter(rows: Any) -> Accepted:
                accepted = log.accept(rows, requested)
                if accepted.is_new:
                    check_new()
                return accepted

            accepted = await self.commits.run(enter)
        except BaseException:
            self.counts.remove(requested.client, size)
            raise
        if accepted.is_new:
            request = replace(requested, body=b"")
            operation = Operation(accepted.number, accepted.request_id, request, size)
            self.payloads.hold(operation, payload)
            self._enter(operation)
        else:
            self.counts.remove(requested.client, size)
        return accepted

    def _enter(self, operation: Operation) -> None:
        operation.waited_since = time.time()
        self._open[operation.request_id] = operation
        if operation.request.kind == "sample":
            self.samples.put(operation)
            self.sample_arrived.set()
        else:
            self.training.put(operation)
            self.training_arrived.set()

    async def finish(self, operations: Iterable[Operation], answer: Result) -> None:
        """Write one answer to operations in the log, and give it to those who wait for it."""
        for some in log.pieces(operations):
            finished = [log.Finished(one.number, answer, time.time()) for one in some]
            await self.commits.run(partial(log.finish, finished=finished))
            for one in some:
                self.answered(one, answer)

    async def count_attempts(self, operations: Sequence[Operation]) -> None:
        """Count an attempt of operations, in which what executed them was lost."""
        for one in operations:
            one.attempts += 1
        numbers = [one.number for one in operations]
        await self.commits.run(partial(log.count_attempts, numbers=numbers))

    def answered(self, operation: Operation, answer: Result) -> None:
        """Give an answer that is in the log to those who wait for it."""
        if self._open.pop(operation.request_id, None) is not None:
            self.counts.remove(operation.request.client, operation.size)
            self.payloads.release(operation)
        self._recent.add(operation.request_id, operation.request.client, answer)
        operation.answer(answer)

    async def result(self, client: str, request_id: str, wait_s: float) -> Result | None:
        """Return the answer to a client's operation; None if it has none within `wait_s`."""
        operation = self._open.get(request_id)
        if operation is not None and operation.request.client == client:
            try:
                async with asyncio.timeout(wait_s):
                    await operation.done.wait()
            except TimeoutError:
                return None
            return operation.result
        recent = self._recent.of(client, request_id)
        if recent is not None:
            return recent
        found = await self.commits.run(partial(log.result_of, request_id=request_id))
        if found is None or found.client != client:
            raise unknown("request", request_id)
        if found.dropped:
            kept = self.served.limits.result_s
            raise RequestRefused(GONE, f"the answer was dropped: they are kept for {kept:g} s")
        return found.answer

    async def unload(self, client: str, name: str) -> Accepted:
        """Give a model up; its saved weights stay. Its unanswered operations fail."""
        model = self.registry.model(client, name)
        requested = OperationRequest(client, "unload_model", f"{name}:unload", 0, b"", name)
        gone = replace(model, unloaded=True)
        answer = json_result(type="unload_model", model_id=name)
        left = self.training.end(name)

        def enter(rows: Any) -> Accepted:
            accepted = log.accept(rows, requested)
            log.put(rows, gone)
            log.finish(rows, [log.Finished(accepted.number, answer, time.time())])
            return accepted

        accepted = await self.commits.run(enter)
        self.registry.set_model(gone)
        self._recent.add(accepted.request_id, client, answer)
        await self.finish(left, UNLOADED)  # after a restart in between, the training lane does it
        return accepted

    async def create_sampler(self, client: str, request: requests.CreateSampler) -> SamplerSource:
        """Open a sampler of saved weights or of the base model."""
        session = self.registry.session(client, request.session_id)
        name = f"{session.id}:sample:{request.sampling_session_seq_id}"
        drawn = ("", "", "")
        if request.model_path is None:
            self._check_base(request.base_model)
        else:
            saved = self.registry.saved(client, request.model_path)
            drawn = (saved.path, saved.file, saved.model)
        return await self.registry.create_sampler(SamplerSource(name, session.id, client, *drawn))


def _delete_abandoned(folder: Path, named: Collection[str]) -> None:
    """Delete states that no model names: of a process that ended before it said so."""
    for path in (folder / "models").glob("*/*"):
        if f"models/{path.parent.name}/{path.name}" not in named:
            path.unlink(missing_ok=True)
