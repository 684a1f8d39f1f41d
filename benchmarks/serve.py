"""A training server over HTTP: what a step costs beyond the mesh's own, and many clients at once.

    overhead_over_mesh   a client's step over HTTP, with its log on disk, over the same two calls of
                         the trainer actor alone: of 16 sequences of 256 tokens
    clients_speedup      8 clients, each step by step, one after another over all at once: of 2
                         sequences of 16 tokens, which leave a core to share
    updates_lost         optimizer steps that were requested and are not in the models

A tiny Qwen3 with random weights; adapters of rank 8 in all layers; the server is the command, in
processes of its own; a step is forward_backward of some sequences, and optim_step. In addition to
the ratios, both are measured with 4 sequences of 48 tokens. There the waits for the disk, three in
a row, are as long as the step, and 8 models in one forward take 8 times as long as one. --quick has
fewer steps of the same sizes, and no 64 clients. With --ranks several processes divide each step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from report import Report, arguments

from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config
from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.plugins.tinker.models.messages import AdamParams, Datum, ModelSpec, TrainCall
from composer_mesh.plugins.tinker.server.results import ForwardBackwardRequest

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
CLIENTS, MANY = 8, 64
RANK = 8
BASE = "base"
START_S = 600.0


@dataclass(frozen=True)
class Load:
    """What each client trains: steps of some sequences."""

    steps: int
    sequences: int = 4
    length: int = 48


LONG, MIDDLE, SHORT = Load(1, 16, 256), Load(1), Load(1, 2, 16)


# The server, as a user starts it. -----------------------------------------------------------


def write_policy(folder: Path) -> None:
    """Write the quickstart's model with random weights."""
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    model = policy.build_model(load_config(CONFIG).policy, tokenizer, 1)
    policy.save_policy(model, tokenizer, folder)


def settings_of(folder: Path, base_model: str, ranks: int = 1) -> list[str]:
    """Return the settings of a server of that model, which clients know by a name."""
    models = MANY + CLIENTS + 2
    serve = [f"serve.base_model={base_model}", f"serve.models_in_memory={models}"]
    return [f"policy.path={folder}", *serve, f"trainer.ranks={ranks}"]


def serve_command(settings: Sequence[str], output: Path, port: int) -> list[str]:
    words = [word for one in settings for word in ("--set", one)]
    words += ["--output", str(output), "--port", str(port)]
    return [sys.executable, "-m", "composer_mesh", "serve", str(CONFIG), *words]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serving(
    command: list[str], port: int, log: Path, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Run a server for a block, once it answers; yields its URL."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        wait_until_ready(process, f"{url}/api/v1/healthz", log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            httpx.get(url, timeout=5)
        except httpx.HTTPError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"a server ended, or does not answer after {START_S:g} s:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


# Its clients. -------------------------------------------------------------------------------


class Client:
    """A client without an SDK: its requests, and none of its own work."""

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self._http, self._number = http, number
        self._seq, self.model = 0, ""

    async def open(self) -> None:
        session = (await self._post("create_session"))["session_id"]
        lora = {"rank": RANK, "seed": self._number}
        base = {"base_model": BASE, "model_seq_id": 0, "lora_config": lora}
        accepted = await self._post("create_model", session_id=session, **base)
        self.model = accepted["model_id"]

    async def steps(self, load: Load) -> list[float]:
        """Train step by step; return the seconds of each."""
        took = []
        for _ in range(load.steps):
            begun = time.perf_counter()
            await self._step(load)
            took.append(time.perf_counter() - begun)
        return took

    async def _step(self, load: Load) -> None:
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
        update = {"model_id": self.model, "seq_id": self._seq + 2}
        accepted = [
            answer.json(),
            await self._post("optim_step", **update, adam_params={"learning_rate": 1e-3}),
        ]
        self._seq += 2
        for one in accepted:
            await self._result(one)

    async def sample(self, tokens: int) -> float:
        begun = time.perf_counter()
        prompt, settings = {"chunks": [{"tokens": [*range(3, 43)]}]}, {"max_tokens": tokens}
        await self._result(
            await self._post("asample", base_model=BASE, prompt=prompt, sampling_params=settings)
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


async def one_after_another_s(clients: Sequence[Client], load: Load) -> float:
    """Return the seconds of all steps of some clients, a client at a time."""
    begun = time.perf_counter()
    for client in clients:
        await client.steps(load)
    return time.perf_counter() - begun


async def all_at_once_s(clients: Sequence[Client], load: Load) -> float:
    """Return the seconds of all steps of some clients at once."""
    begun = time.perf_counter()
    await asyncio.gather(*(one.steps(load) for one in clients))
    return time.perf_counter() - begun


# The measurements. --------------------------------------------------------------------------


@asynccontextmanager
async def trainer_alone(settings: Sequence[str]) -> AsyncIterator[Any]:
    """Start the trainer of such a server without the server; yields calls to it."""
    from composer_mesh.mesh.spawn import MeshHost
    from composer_mesh.mesh.supervision import Supervisor
    from composer_mesh.plugins.tinker.server.mesh_backend import ServeMesh
    from composer_mesh.services.run.preload import PRELOAD

    def record(kind: str, actor: str, detail: str, /, **_: Any) -> None:
        print(f"{kind} {actor} {detail}", file=sys.stderr)

    async with MeshHost(Supervisor(record), preload=PRELOAD) as host:
        mesh = await ServeMesh.start(load_config(CONFIG, settings), host, record)
        yield mesh.trainer
        await mesh.close()


async def alone(trainer: Any, load: Load) -> list[float]:
    """Return the seconds of each step by two calls of the trainer actor."""
    took = []
    await trainer.open("alone", ModelSpec(RANK, 1), None)
    for step in range(load.steps):
        begun = time.perf_counter()
        data = data_of(step, load)
        loss = TrainCall("alone", 2 * step, "forward_backward", data, "cross_entropy")
        await trainer.execute([loss])
        update = TrainCall("alone", 2 * step + 1, "optim_step", adam=AdamParams(1e-3))
        await trainer.execute([update])
        took.append(time.perf_counter() - begun)
    return took


async def measure(
    report: Report, steps: int, samples: int, counts: Sequence[int], ranks: int
) -> None:
    """Measure steps of one and of several clients, and samples."""
    with tempfile.TemporaryDirectory() as name:
        place, port = Path(name), free_port()
        write_policy(place / "policy")
        settings = settings_of(place / "policy", BASE, ranks)
        command = serve_command(settings, place / "served", port)
        with serving(command, port, place / "log") as url:
            async with (
                trainer_alone(settings) as trainer,
                httpx.AsyncClient(base_url=url, timeout=120) as http,
            ):
                clients = [Client(http, number) for number in range(max(counts))]
                for one in clients:
                    await one.open()
                requested = 2 * CLIENTS
                await all_at_once_s(clients[:CLIENTS], Load(2))
                requested += await measure_one(report, trainer, clients[0], steps)
                requested += await measure_many(report, clients, steps, counts)
                took = await asyncio.gather(
                    *(clients[number % len(clients)].sample(16) for number in range(samples))
                )
                done = (await http.get("/api/v1/metrics")).json()["optimizer_steps"]
        report.figures["p50_sample_s"] = statistics.median(took)
        report.figures["p99_sample_s"] = sorted(took)[int(0.99 * len(took))]
        state = next((place / "served").glob("models/*/*.safetensors"))
        report.figures["bytes on disk of an idle model"] = state.stat().st_size
    report.ratios["updates_lost"] = float(requested - done)


async def measure_one(report: Report, trainer: Any, client: Client, steps: int) -> int:
    """Compare a step over HTTP with one over the mesh, in turns; return the steps over HTTP."""
    for name, size in (("", LONG), (" of 4 x 48 tokens", MIDDLE)):
        load, direct, over = replace(size, steps=steps), list[float](), list[float]()
        for _ in range(3):
            direct += await alone(trainer, load)
            over += await client.steps(load)
        mesh_s, http_s = statistics.median(direct), statistics.median(over)
        report.figures |= {
            f"step_s over the mesh{name}": mesh_s,
            f"step_s over HTTP{name}": http_s,
        }
        report.ratios[f"overhead_over_mesh{name.replace(' ', '_')}"] = http_s / mesh_s
    return 6 * steps


async def measure_many(
    report: Report, clients: Sequence[Client], steps: int, counts: Sequence[int]
) -> int:
    """Compare clients one after another with all at once; return the steps of all."""
    for count in counts:
        for name, size in (("", SHORT), (" of 4 x 48 tokens", MIDDLE)):
            load = replace(size, steps=steps)
            apart = await one_after_another_s(clients[:count], load)
            together = await all_at_once_s(clients[:count], load)
            report.figures |= {
                f"steps_per_s of {count} apart{name}": count * steps / apart,
                f"steps_per_s of {count} at once{name}": count * steps / together,
            }
            ratio = "clients_speedup" if count == CLIENTS else f"clients_speedup_{count}"
            report.ratios[f"{ratio}{name.replace(' ', '_')}"] = apart / together
    return 4 * steps * sum(counts)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the trainer")
    given = parser.parse_args()
    prepare_environment()
    report = Report("serve")
    steps, samples, counts = (10, 64, (CLIENTS,)) if given.quick else (25, 256, (CLIENTS, MANY))
    asyncio.run(measure(report, steps, samples, counts, given.ranks))
    rows = [(name, f"{value:.4g}") for name, value in report.figures.items()]
    report.print_table("a training server", ("", "value"), rows)
    report.finish(given.json)


if __name__ == "__main__":
    main()
