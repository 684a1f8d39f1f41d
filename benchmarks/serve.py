"""A training server over HTTP: what a step costs beyond the mesh's own, and many clients at once.

    overhead_over_mesh   a client's step over HTTP, with its log on disk, over the same two calls of
                         the trainer actor alone: of 16 sequences of 256 tokens
    clients_speedup      8 clients, each step by step, one after another over all at once: of 2
                         sequences of 16 tokens, which leave a core to share
    updates_lost         optimizer steps that were asked for and are not in the models

A tiny Qwen3 with random weights; adapters of rank 8 in all layers; clients in a process of their
own; a step is forward_backward of some sequences, and optim_step. Beside the ratios, both are
measured with 4 sequences of 48 tokens: there the waits for the disk, three in a row, are as long as
the step, and 8 models in one forward take 8 times as long as one. --quick has fewer steps of the
same sizes, and no 64 clients. With --ranks several processes divide each step.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import Report, arguments
from serve_clients import LONG, MIDDLE, RANK, SHORT, ClientProcess, Load, data_of

from composer_mesh.actors.models import policy
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.plugins.tinker.models.messages import AdamParams, ModelSpec, TrainCall
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.access import ClientAccess
from composer_mesh.plugins.tinker.server.app import make_app
from composer_mesh.plugins.tinker.server.mesh_backend import (
    MeshSampleBackend,
    ServeMesh,
)
from composer_mesh.plugins.tinker.server.rest_routes import Archives
from composer_mesh.plugins.tinker.server.sampling_lane import SamplingFacts
from composer_mesh.plugins.tinker.server.server import Served
from composer_mesh.plugins.tinker.server.server_tasks import ServerTasks, Sizes, opened_log
from composer_mesh.plugins.tinker.server.training_data import DataLimits
from composer_mesh.services.run.preload import PRELOAD
from composer_mesh.services.web.http_server import http_config, listening, listening_socket

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"
CLIENTS, MANY = 8, 64


@dataclass
class Running:
    """A server of a mesh on a port."""

    mesh: ServeMesh
    tasks: ServerTasks
    folder: Path
    url: str


def config_of(folder: Path, ranks: int = 1) -> Config:
    """Return the quickstart's config with a policy of random weights."""
    config = load_config(CONFIG, [f"trainer.ranks={ranks}"])
    tokenizer = policy.build_tokenizer(["use the tool"] * 9, 300)
    policy.save_policy(policy.build_model(config.policy, tokenizer, 1), tokenizer, folder)
    own = config.policy.model_copy(update={"path": folder})
    limits = config.serve.model_copy(update={"models_in_memory": MANY + CLIENTS + 2})
    return config.model_copy(update={"policy": own, "serve": limits})


@asynccontextmanager
async def running(place: Path, ranks: int) -> AsyncIterator[Running]:
    """Serve for a block."""
    config = config_of(place / "policy", ranks)

    def record(kind: str, actor: str, detail: str, /, **_: Any) -> None:
        print(f"{kind} {actor} {detail}", file=sys.stderr)

    async with MeshHost(Supervisor(record), preload=PRELOAD) as host:
        mesh = await ServeMesh.start(config, host, record)
        data = DataLimits(mesh.vocabulary, config.policy.max_context, 1024, 100)
        facts = SamplingFacts(config.policy.max_context, (1,), str)
        served = Served("base", "", data, config.serve)
        with (
            opened_log(place / "log.sqlite") as (commits, executing),
            listening_socket("127.0.0.1", 0) as listener,
        ):
            found = await commits.run(log.read_records)
            backends = mesh.trainer, MeshSampleBackend(mesh.samplers)
            sizes = Sizes(config.trainer.microbatch_tokens * ranks, 128)
            more: Any = (facts, executing, sizes)
            tasks = ServerTasks(served, place, commits, found, *backends, *more)
            archives = Archives(place, lambda _: {})
            app = ClientAccess(
                make_app(tasks.server, tasks.sampling.cancel, archives), ["127.0.0.1"], []
            )
            running = asyncio.create_task(tasks.run())
            async with listening(http_config(app, 5), listener) as port:
                yield Running(mesh, tasks, place, f"http://127.0.0.1:{port}")
            running.cancel()
        await mesh.close()


async def alone(mesh: ServeMesh, load: Load) -> list[float]:
    """Return the seconds of each step by two calls of the trainer actor."""
    backend, took = mesh.trainer, []
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


async def overhead(server: Running, clients: ClientProcess, load: Load) -> tuple[float, float]:
    """Return the median seconds of a step over the mesh and over HTTP, measured in turns."""
    direct, over = list[float](), list[float]()
    for _ in range(3):
        direct += await alone(server.mesh, load)
        over += await clients.steps_s(load)
    return statistics.median(direct), statistics.median(over)


async def measure(report: Report, load: Load, samples: int, many: bool, ranks: int) -> None:
    """Measure all of it."""
    with tempfile.TemporaryDirectory() as place:
        async with running(Path(place), ranks) as server:
            with closing(ClientProcess(server.url, MANY if many else CLIENTS)) as clients:
                await measure_clients(report, server, clients, load, samples, many)


async def measure_clients(
    report: Report,
    server: Running,
    clients: ClientProcess,
    load: Load,
    samples: int,
    many: bool,
) -> None:
    """Measure steps of one and of several clients, and samples."""
    models = await clients.models()
    await clients.all_at_once_s(CLIENTS, Load(2))
    asked = 2 * CLIENTS
    for name, size in (("", LONG), (" of 4 x 48 tokens", MIDDLE)):
        one = replace(size, steps=load.steps)
        mesh_s, http_s = await overhead(server, clients, one)
        asked += 3 * load.steps
        report.figures |= {
            f"step_s over the mesh{name}": mesh_s,
            f"step_s over HTTP{name}": http_s,
        }
        report.ratios[f"overhead_over_mesh{name.replace(' ', '_')}"] = http_s / mesh_s
    for count in (CLIENTS, *([MANY] if many else [])):
        for name, size in (("", SHORT), (" of 4 x 48 tokens", MIDDLE)):
            one = replace(size, steps=load.steps)
            apart = await clients.one_after_another_s(count, one)
            together = await clients.all_at_once_s(count, one)
            asked += 2 * count * load.steps
            report.figures |= {
                f"steps_per_s of {count} apart{name}": count * load.steps / apart,
                f"steps_per_s of {count} at once{name}": count * load.steps / together,
            }
            ratio = "clients_speedup" if count == CLIENTS else f"clients_speedup_{count}"
            report.ratios[f"{ratio}{name.replace(' ', '_')}"] = apart / together
    took = await clients.samples_s(samples, 16)
    report.figures["p50_sample_s"] = statistics.median(took)
    report.figures["p99_sample_s"] = sorted(took)[int(0.99 * len(took))]
    saved = await server.tasks.store.save(models[0])
    report.figures["bytes on disk of an idle model"] = (server.folder / saved.file).stat().st_size
    done = sum(one.steps for one in server.tasks.registry.models())
    report.ratios["updates_lost"] = float(asked - done)


async def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the trainer")
    given = parser.parse_args()
    report = Report("serve")
    load, samples = (Load(10), 64) if given.quick else (Load(25), 256)
    await measure(report, load, samples, not given.quick, given.ranks)
    rows = [(name, f"{value:.4g}") for name, value in report.figures.items()]
    report.print_table("a training server", ("", "value"), rows)
    report.finish(given.json)


if __name__ == "__main__":
    asyncio.run(main())
