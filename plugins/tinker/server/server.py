"""A training server without HTTP: accepts operations of clients, and gives their answers.

    accept: check -> log -> queue          answer: lane -> log -> whoever waits

Every method takes the client that asks, and finds only what is that client's.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server import requests
from composer_mesh.plugins.tinker.server.fair_queue import OpenCounts, SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.payloads import Payloads
from composer_mesh.plugins.tinker.server.records import (
    Accepted,
    Operation,
    OperationRequest,
    SamplerSource,
    saved_path,
)
from composer_mesh.plugins.tinker.server.registry import REMEMBERED, Registry
from composer_mesh.plugins.tinker.server.requests import check_sample
from composer_mesh.plugins.tinker.server.results import RecentAnswers, Result, failure, json_result
from composer_mesh.plugins.tinker.server.training_data import DataLimits, TrainingRequest
from composer_mesh.services.web.bodies import MOST_VALUES, Bodies
from composer_mesh.services.web.errors import GONE, TOO_MANY, RequestRefused, bad, unknown


@dataclass(frozen=True)
class ServedModel:
    """What is served: the base model's name and bounds."""

    base_model: str
    tokenizer: str
    data: DataLimits
    limits: ServeConfig
    adapts_head: bool = True
    """Whether samplers can serve adapters in the model's head."""


class TrainingServer:
    """Sessions, models and operations of all clients."""

    def __init__(
        self,
        served: ServedModel,
        registry: Registry,
        commits: GroupCommit,
        training: TrainingQueue,
        samples: SampleQueue,
        payloads: Payloads,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.served, self.registry = served, registry
        self._commits, self._training, self._samples = commits, training, samples
        self._payloads, self._clock = payloads, clock
        self._open: dict[str, Operation] = {}
        self._recent = RecentAnswers()
        limits = served.limits
        self._counts = OpenCounts(
            limits.max_open_operations,
            limits.max_open_per_client,
            limits.max_open_mb,
            limits.max_open_mb_per_client,
        )
        most, tokens = int(limits.max_request_mb * 1e6), served.data.context * limits.max_top_k
        self.bodies = Bodies(most, 2 * most, 8 * most, MOST_VALUES + tokens)
        self.wake_training: Callable[[], None] = lambda: None
        self.wake_sampling: Callable[[], None] = lambda: None
        self.ended = asyncio.Event()
        """Set where no operation will be answered any more."""

    @property
    def open_operations(self) -> int:
        """Number of operations that are not answered."""
        return self._counts.total

    def open_numbers(self) -> set[int]:
        """Return the numbers of the operations that are not answered."""
        return {one.number for one in self._open.values()}

    @property
    def is_full(self) -> bool:
        """Whether no further operation is accepted now."""
        return self._counts.total >= self.served.limits.max_open_operations

    def metrics(self) -> dict[str, Any]:
        """Return counts for operators."""
        models = self.registry.models()
        return {
            "open_operations": self._counts.total,
            "open_bytes": self._counts.bytes,
            "waiting_training": len(self._training),
            "waiting_samples": len(self._samples),
            "models": sum(not one.unloaded for one in models),
            "changes": sum(one.position for one in models),
            "optimizer_steps": sum(one.steps for one in models),
        }

    async def recover(self) -> int:
        """Queue the unanswered operations of the log again; return how many there were."""
        seqs = await self._commits.run(log.next_seqs)
        for model in self.registry.models():
            if not model.unloaded:
                self._training.begin(model.id, model.client, seqs.get(model.id, 1))
        found = await self._commits.run(log.queued)
        for one in found:
            self._counts.add(one.request.client, one.size, checked=False)
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
        text = json.dumps(metadata or {})
        model = self.registry.new_model(client, session, seq, spec, text)
        if not self.registry.knows(model.id):
            self._check_models(client)
        requested = OperationRequest(
            client, "create_model", f"{session}:train", seq, request.canonical()
        )
        answer = json_result(type="create_model", model_id=model.id)

        def enter(rows: Any) -> Accepted:
            accepted = log.accept(rows, requested)
            if accepted.is_new:
                log.put(rows, model)
                log.finish(rows, [log.Finished(accepted.number, answer, self._clock())])
            return accepted

        accepted = await self._commits.run(enter)
        if accepted.is_new:
            self.registry.set_model(model)
            self._training.begin(model.id, client, first_seq)
            self._recent.add(accepted.request_id, client, answer)
        return accepted

    def _check_models(self, client: str) -> None:
        limits, alive = self.served.limits, [m for m in self.registry.models() if not m.unloaded]
        own = sum(one.client == client for one in alive)
        remembered = len(self.registry.models(client))
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
        identity = request.identity()
        return await self._of_model(client, model, kind, seq, body, request, 1, identity)

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
        check = partial(self._training.check_seq, model.id, seq)
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
        self._counts.add(requested.client, size)
        try:

            def enter(rows: Any) -> Accepted:
                accepted = log.accept(rows, requested)
                if accepted.is_new:
                    check_new()
                return accepted

            accepted = await self._commits.run(enter)
        except BaseException:
            self._counts.remove(requested.client, size)
            raise
        if accepted.is_new:
            request = replace(requested, body=b"")
            operation = Operation(accepted.number, accepted.request_id, request, size)
            self._payloads.hold(operation, payload)
            self._enter(operation)
        else:
            self._counts.remove(requested.client, size)
        return accepted

    def _enter(self, operation: Operation) -> None:
        operation.waited_since = self._clock()
        self._open[operation.request_id] = operation
        if operation.request.kind == "sample":
            self._samples.put(operation)
            self.wake_sampling()
        else:
            self._training.put(operation)
            self.wake_training()

    def answered(self, operation: Operation, answer: Result) -> None:
        """Give an answer that is in the log to those who wait for it."""
        if self._open.pop(operation.request_id, None) is not None:
            self._counts.remove(operation.request.client, operation.size)
            self._payloads.release(operation)
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
        found = await self._commits.run(partial(log.result_of, request_id=request_id))
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
        failed = failure("its model was unloaded", "user")
        left = self._training.end(name)
        now = self._clock()

        def enter(rows: Any) -> Accepted:
            accepted = log.accept(rows, requested)
            log.put(rows, gone)
            log.finish(rows, [log.Finished(accepted.number, answer, now)])
            return accepted

        accepted = await self._commits.run(enter)
        self.registry.set_model(gone)
        self._recent.add(accepted.request_id, client, answer)
        for some in log.pieces(
            left
        ):  # after a restart in between, the training lane fails the rest
            finished = [log.Finished(one.number, failed, now) for one in some]
            await self._commits.run(partial(log.finish, finished=finished))
            for one in some:
                self.answered(one, failed)
        return accepted

    async def delete_saved(self, client: str, path: str) -> None:
        """Forget a client's saved weights; housekeeping deletes their file."""
        await self.registry.delete_saved(self.registry.saved(client, path))

    async def create_sampler(self, client: str, request: requests.CreateSampler) -> SamplerSource:
        """Open a sampler of saved weights or of the base model."""
        session = self.registry.session(client, request.session_id)
        name = f"{session.id}:sample:{request.sampling_session_seq_id}"
        if request.model_path is None:
            self._check_base(request.base_model)
            return await self.registry.create_sampler(
                SamplerSource(name, session.id, client, "", "", "")
            )
        saved = self.registry.saved(client, request.model_path)
        return await self.registry.create_sampler(
            SamplerSource(name, session.id, client, saved.path, saved.file, saved.model)
        )
