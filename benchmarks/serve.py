"""A training server over HTTP: what a step costs beyond the mesh's own, and many clients at once.

    overhead_over_mesh   a client's step over HTTP, with its log on disk, over the same two calls of
                         the trainer actor alone: of 16 sequences of 256 tokens
    clients_speedup      8 clients, each step by step, one after another over all at once: of 2
                         sequences of 16 tokens, which leave a core to share
    updates_lost         optimizer steps that were asked for and are not in the models

A tiny Qwen3 with random weights; adapters of rank 8 in all layers; a step is forward_backward of
some sequences, and optim_step. Beside the ratios, both are measured with 4 sequences of 48 tokens:
there the waits for the disk, three in a row, are as long as the step, and 8 models in one forward
take 8 times as long as one. --quick has fewer steps of the same sizes, and no 64 clients.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from report import Report, arguments

from composer_mesh.actors.models import policy
from composer_mesh.actors.served_models.messages import AdamParams, Datum, ModelSpec, TrainCall
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.services.run.preload import PRELOAD
from composer_mesh.services.serve import operation_log as log
from composer_mesh.services.serve.access import ClientAccess
from composer_mesh.services.serve.app import make_app
from composer_mesh.services.serve.archives import Archives
from composer_mesh.services.serve.mesh_backend import (
    MeshSampleBackend,
    MeshTrainBackend,
    ServeMesh,
)
from composer_mesh.services.serve.protobuf_messages import ForwardBackwardRequest
from composer_mesh.services.serve.sampling_lane import SamplingFacts
from composer_mesh.services.serve.server import Served
from composer_mesh.services.serve.server_tasks import ServerTasks, Sizes, opened_log
from composer_mesh.services.serve.training_data import DataLimits
from composer_mesh.services.serve_env.http_server import http_config, listening
from composer_mesh.services.serve_env.sockets import reusable_socket

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
RANK, CLIENTS, MANY = 8, 8, 64


@dataclass(frozen=True)
class Load:
    """What each client trains: steps of some sequences."""

    steps: int
    sequences: int = 4
    length: int = 48


LONG, MIDDLE, SHORT = Load(1, 16, 256), Load(1), Load(1, 2, 16)


@dataclass
class Running:
    """A server of a mesh on a port."""

    mesh: ServeMesh
    tasks: ServerTasks
    url: str


def config_of(folder: Path) -> Config:
    """Return the quickstart's config with a policy of random weights."""
    config = load_config(CONFIG)
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    policy.save_policy(policy.build_model(config.policy, tokenizer, 1), tokenizer, folder)
    own = config.policy.model_copy(update={"path": folder})
    limits = config.serve.model_copy(update={"models_in_memory": MANY + CLIENTS + 2})
    return config.model_copy(update={"policy": own, "serve": limits})


@asynccontextmanager
async def running(place: Path) -> AsyncIterator[Running]:
    """Serve for a block."""
    config = config_of(place / "policy")

    def record(kind: str, actor: str, detail: str, /, **_: Any) -> None:
        print(f"{kind} {actor} {detail}", file=sys.stderr)

    async with MeshHost(Supervisor(record), preload=PRELOAD) as host:
        mesh = await ServeMesh.start(config, host, record)
        data = DataLimits(mesh.vocabulary, config.policy.max_context, 1024, 100)
        facts = SamplingFacts(config.policy.max_context, (1,), str)
        served = Served("base", "", data, config.serve)
        with (
            opened_log(place / "log.sqlite") as commits,
            reusable_socket("127.0.0.1", 0) as listener,
        ):
            found = await commits.run(log.remembered)
            backends = MeshTrainBackend(mesh.trainer), MeshSampleBackend(mesh.samplers)
            sizes = Sizes(config.trainer.microbatch_tokens, 128)
            tasks = ServerTasks(served, place, commits, found, *backends, facts, sizes)
            archives = Archives(place, lambda _: {})
            app = ClientAccess(
                make_app(tasks.server, tasks.sampling.cancel, archives), ["127.0.0.1"], []
            )
            executing = asyncio.create_task(tasks.run())
            async with listening(http_config(app, 5), listener) as port:
                yield Running(mesh, tasks, f"http://127.0.0.1:{port}")
            executing.cancel()
        await mesh.close()


class Client:
    """A client without an SDK: its requests, and none of its own work."""

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self._http, self._number = http, number
        self._seq, self.model, self.session = 0, "", ""

    async def open(self) -> None:
        self.session = (await self._post("create_session"))["session_id"]
        lora = {"rank": RANK, "seed": self._number}
        base = {"base_model": "base", "model_seq_id": 0, "lora_config": lora}
        accepted = await self._post("create_model", session_id=self.session, **base)
        self.model = accepted["model_id"]

    async def step(self, load: Load) -> None:
        message = ForwardBackwardRequest(
            model_id=self.model, seq_id=self._seq + 1, loss_fn="cross_entropy"
        )
        for datum in data_of(self._seq + 1000 * self._number, load):
            one = message.data.add()
            one.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
            targets = one.loss_fn_inputs["target_tokens"]
            targets.dense, targets.dtype = datum.inputs["target_tokens"].tobytes(), 2
            targets.shape.append(load.length)
        body, headers = message.SerializeToString(), {"content-type": "application/x-protobuf"}
        answer = await self._http.post("/api/v1/forward_backward", content=body, headers=headers)
        adam = {"learning_rate": 1e-3}
        asked = [answer.json()]
        asked.append(
            await self._post(
                "optim_step", model_id=self.model, seq_id=self._seq + 2, adam_params=adam
            )
        )
        self._seq += 2
        for one in asked:
            await self._result(one)

    async def sample(self, tokens: int) -> float:
        begun = time.perf_counter()
        prompt = {"chunks": [{"tokens": [*range(3, 43)]}]}
        settings = {"max_tokens": tokens}
        await self._result(
            await self._post("asample", base_model="base", prompt=prompt, sampling_params=settings)
        )
        return time.perf_counter() - begun

    async def _result(self, accepted: Any) -> None:
        body = {"request_id": accepted["request_id"]}
        answer = await self._http.post("/api/v1/retrieve_future", json=body)
        assert b'"error"' not in answer.content, answer.content

    async def _post(self, path: str, **body: Any) -> Any:
        answer = await self._http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def data_of(seed: int, load: Load) -> tuple[Datum, ...]:
    """Return sequences of random tokens."""
    rng = np.random.default_rng(seed)
    return tuple(
        Datum(
            rng.integers(3, 90, load.length),
            {"target_tokens": rng.integers(3, 90, load.length)},
        )
        for _ in range(load.sequences)
    )


async def alone(mesh: ServeMesh, load: Load) -> list[float]:
    """Return the seconds of each step by two calls of the trainer actor."""
    backend, took = MeshTrainBackend(mesh.trainer), []
    await backend.open("alone", ModelSpec(RANK, 1), None)
    for step in range(load.steps):
        begun = time.perf_counter()
        data = data_of(step, load)
        await backend.execute(
            [TrainCall("alone", 2 * step, "forward_backward", data, "cross_entropy")]
        )
        adam = AdamParams(1e-3)
        await backend.execute([TrainCall("alone", 2 * step + 1, "optim_step", adam=adam)])
        took.append(time.perf_counter() - begun)
    return took


async def steps_of(client: Client, load: Load) -> list[float]:
    """Return the seconds of each step of a client."""
    took = []
    for _ in range(load.steps):
        begun = time.perf_counter()
        await client.step(load)
        took.append(time.perf_counter() - begun)
    return took


async def one_after_another(clients: list[Client], load: Load) -> float:
    begun = time.perf_counter()
    for client in clients:
        await steps_of(client, load)
    return time.perf_counter() - begun


async def all_at_once(clients: list[Client], load: Load) -> float:
    begun = time.perf_counter()
    await asyncio.gather(*(steps_of(client, load) for client in clients))
    return time.perf_counter() - begun


async def overhead(server: Running, client: Client, load: Load) -> tuple[float, float]:
    """Return the median seconds of a step over the mesh and over HTTP, measured in turns."""
    direct, over = list[float](), list[float]()
    for _ in range(3):
        direct += await alone(server.mesh, load)
        over += await steps_of(client, load)
    return statistics.median(direct), statistics.median(over)


async def measure(report: Report, load: Load, samples: int, many: bool) -> None:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as place:
        async with (
            running(Path(place)) as server,
            httpx.AsyncClient(base_url=server.url, timeout=120) as http,
        ):
            clients = [Client(http, number) for number in range(MANY if many else CLIENTS)]
            for client in clients:
                await client.open()
            await all_at_once(clients[:CLIENTS], Load(2))
            asked = 2 * CLIENTS
            for name, size in (("", LONG), (" of 4 x 48 tokens", MIDDLE)):
                one = replace(size, steps=load.steps)
                mesh_s, http_s = await overhead(server, clients[0], one)
                asked += 3 * load.steps
                report.figures |= {
                    f"step_s over the mesh{name}": mesh_s,
                    f"step_s over HTTP{name}": http_s,
                }
                report.ratios[f"overhead_over_mesh{name.replace(' ', '_')}"] = http_s / mesh_s
            for count in (CLIENTS, *([MANY] if many else [])):
                for name, size in (("", SHORT), (" of 4 x 48 tokens", MIDDLE)):
                    one = replace(size, steps=load.steps)
                    apart = await one_after_another(clients[:count], one)
                    together = await all_at_once(clients[:count], one)
                    asked += 2 * count * load.steps
                    report.figures |= {
                        f"steps_per_s of {count} apart{name}": count * load.steps / apart,
                        f"steps_per_s of {count} at once{name}": count * load.steps / together,
                    }
                    ratio = "clients_speedup" if count == CLIENTS else f"clients_speedup_{count}"
                    report.ratios[f"{ratio}{name.replace(' ', '_')}"] = apart / together
            took = await asyncio.gather(*(clients[n % CLIENTS].sample(16) for n in range(samples)))
            report.figures["p50_sample_s"] = statistics.median(took)
            report.figures["p99_sample_s"] = sorted(took)[int(0.99 * len(took))]
            saved = await server.tasks.store.save(clients[0].model)
            report.figures["bytes on disk of an idle model"] = (
                (Path(place) / saved.file).stat().st_size
            )
            done = sum(one.steps for one in server.tasks.registry.models())
            report.ratios["updates_lost"] = float(asked - done)


async def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    report = Report("serve")
    load, samples = (Load(10), 64) if given.quick else (Load(25), 256)
    await measure(report, load, samples, many=not given.quick)
    rows = [(name, f"{value:.4g}") for name, value in report.figures.items()]
    report.print_table("a training server", ("", "value"), rows)
    report.finish(given.json)


if __name__ == "__main__":
    asyncio.run(main())
