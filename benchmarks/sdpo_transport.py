"""Transfer time and size of teacher outputs, and the share of the teacher's time that is hidden.

    python benchmarks/sdpo_transport.py [--quick] [--json FILE]

Moves: one teacher output from one process to another, by a registered buffer that is read
one-sidedly, as the answer of an endpoint, and, for scale, by a copy inside one process. Methods
alternate, so that other load affects all of them. Overlap: steps of the run's own teachers, output
buffer and calls, with compute simulated by sleeps (`sdpo_actors.py`); hidden is what the trainer
does not wait for.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes import the actors by name, and inherit only the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

import torch  # noqa: E402
from report import Report, arguments  # noqa: E402
from sdpo_actors import (  # noqa: E402
    FORWARD,
    Shape,
    SignalReader,
    SignalSender,
    SleepingTeachers,
    SleepingTrainer,
)

from composer_mesh.configs.load import load_config  # noqa: E402
from composer_mesh.configs.schema import Config  # noqa: E402
from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.spawned import SpawnedActor  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402
from composer_mesh.mesh.transport import BufferHandle, transport_name  # noqa: E402
from composer_mesh.rollouts.alignment import HintedView  # noqa: E402
from composer_mesh.rollouts.batches import PolicySample, StepBatch  # noqa: E402
from composer_mesh.services.training.step import MeshTraining, StaleReceiver  # noqa: E402

PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
SIGNALS = ("hidden", "topk", "full")
HIDDEN, VOCABULARY = 1_024, 32_768
MIB = 1 << 20
CONTEXT = 512
"""Tokens of each simulated sample, and of a microbatch: one sample fills it."""

Move = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Size:
    """Measured sizes: tokens of a moved teacher output, repeats, and the simulated steps."""

    tokens: int
    repeats: int
    microbatches: tuple[int, ...]
    steps: int
    compute_s: float


async def moves(report: Report, host: MeshHost, size: Size) -> None:
    """Measure bytes and times of each kind of teacher output, with each method."""
    sender = await host.spawn("signal_sender", SignalSender)
    reader = await host.spawn("signal_reader", SignalReader)
    rows = []
    for teacher_output in SIGNALS:
        config = a_run(teacher_output).sdpo
        shape = Shape(size.tokens, HIDDEN, VOCABULARY)
        layout = await sender.call("load", config, shape)
        handle: BufferHandle = await sender.call("offer")
        assert handle.buffer is not None
        figures = {"bytes": handle.nbytes, "bytes_read": handle.buffer.size()}
        took = await alternating(ways(sender, reader, layout, handle.nbytes), size.repeats)
        for way, seconds in took.items():
            report.figures[f"{teacher_output}_{way}_ms"] = round(seconds * 1e3, 2)
        for name, value in figures.items():
            report.figures[f"{teacher_output}_{name}"] = value
        rows.append(
            [
                teacher_output,
                f"{handle.nbytes / size.tokens:,.0f}",
                f"{handle.nbytes / MIB:,.2f}",
                *(f"{seconds * 1e3:,.2f}" for seconds in took.values()),
            ]
        )
    await asyncio.gather(host.stop(sender), host.stop(reader))
    title = f"{size.tokens} tokens, hidden {HIDDEN:,}, vocabulary {VOCABULARY:,}; medians, ms"
    names = ["bytes a token", "MiB", "buffer", "message", "relayed", "memcpy"]
    report.print_table(title, ["teacher_output", *names], rows)
    of = {name: float(value) for name, value in report.figures.items() if name != "transport"}
    report.ratios["hidden_bytes_over_full"] = of["hidden_bytes"] / of["full_bytes"]
    report.ratios["hidden_bytes_read_over_full"] = of["hidden_bytes_read"] / of["full_bytes_read"]
    report.ratios["hidden_time_over_full"] = of["hidden_buffer_ms"] / of["full_buffer_ms"]
    for teacher_output in ("hidden", "full"):
        ratio = of[f"{teacher_output}_buffer_ms"] / of[f"{teacher_output}_message_ms"]
        report.ratios[f"{teacher_output}_buffer_time_over_message"] = ratio


def ways(
    sender: SpawnedActor, reader: SpawnedActor, layout: object, nbytes: int
) -> dict[str, Move]:
    """Return the transfer methods. A relayed message is what calls without buffers would use."""
    source, target = torch.ones(2, nbytes, dtype=torch.uint8)

    async def buffer() -> None:
        await reader.call("fetch", layout, await sender.call("offer"))

    async def relayed() -> None:
        await reader.call("accept", layout, await sender.call("send"))

    async def memcpy() -> None:
        target.copy_(source)

    return {
        "buffer": buffer,
        "message": lambda: sender.call("send"),
        "relayed": relayed,
        "memcpy": memcpy,
    }


async def alternating(moves: dict[str, Move], repeats: int) -> dict[str, float]:
    """Return median seconds of each method, alternating, after an uncounted round."""
    found: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(repeats + 1):
        for name, move in moves.items():
            began = time.perf_counter()
            await move()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


async def overlap(report: Report, host: MeshHost, size: Size) -> None:
    """Measure the share of the teacher's time that the trainer does not wait for."""
    rows = []
    most = size.microbatches[-1]
    cases = {
        "hidden": [*((count, 0) for count in size.microbatches), (most // 2, most // 2)],
        "full": [(most, 0)],
    }
    for teacher_output, counts in cases.items():
        simulation = await Simulation.start(host, a_run(teacher_output), size)
        for taught, plain in counts:
            name = f"{teacher_output}, {taught} + {plain}"
            shares, took = await simulation.steps(taught, plain)
            report.figures[f"teacher_time_hidden {name}"] = round(shares, 3)
            report.figures[f"step_s {name}"] = round(took, 3)
            alone, teacher = (taught + plain) * size.compute_s, taught * size.compute_s
            times = (took, alone, alone + teacher)
            best = at_best(taught, plain)
            rows.append(
                [name, f"{shares:.0%}", f"{best:.0%}", *(f"{each * 1e3:,.0f}" for each in times)]
            )
        await simulation.stop()
    report.ratios["teacher_time_hidden"] = float(
        report.figures[f"teacher_time_hidden hidden, {most} + 0"]
    )
    title = f"overlap: {size.compute_s * 1e3:.0f} ms a microbatch each; with views + without"
    columns = ["microbatches", "hidden", "at best", "step ms", "trainer alone", "in turn"]
    report.print_table(title, columns, rows)


def at_best(taught: int, plain: int) -> float:
    """Return the hidden share if only compute took time: only the first output is waited for."""
    before = plain + FORWARD
    return 1 - max(0.0, 1 - before) / taught


class Simulation:
    """One teacher and one trainer of the run, with simulated compute."""

    def __init__(
        self, host: MeshHost, size: Size, teachers: SleepingTeachers, training: MeshTraining
    ) -> None:
        self._host, self._size = host, size
        self._teachers, self._training = teachers, training
        self._step = 0

    @classmethod
    async def start(cls, host: MeshHost, config: Config, size: Size) -> "Simulation":
        shape = Shape(size.tokens, HIDDEN, VOCABULARY)
        teachers = SleepingTeachers(config, host, shape, size.compute_s)
        trainer = await host.spawn("trainer", SleepingTrainer, size.compute_s)
        await teachers.start()
        await asyncio.gather(teachers.load(Path()), trainer.call("load", config, Path()))
        return cls(host, size, teachers, MeshTraining(config, lambda: [trainer], teachers))

    async def steps(self, taught: int, plain: int) -> tuple[float, float]:
        """Return medians over some steps, after an uncounted one: share hidden, seconds."""
        found = []
        for _ in range(self._size.steps + 1):
            batch = a_step(self._step, taught, plain, self._size.tokens)
            found.append(await self._training.train(batch))
            await self._follow()
            self._step += 1
        shares = [1 - one["time/sdpo_wait_s"] / one["time/sdpo_teacher_s"] for one in found[1:]]
        took = [one["time/step_s"] for one in found[1:]]
        return statistics.median(shares), statistics.median(took)

    async def _follow(self) -> None:
        """Make the teacher pull the version that the step made."""
        trainer = next(actor for actor in self._host.actors if actor.kind == "trainer")
        handle = await trainer.call("publish")
        if (got := await self._teachers.pull(handle)) != [handle.version]:
            raise StaleReceiver(handle.version, got)

    async def stop(self) -> None:
        await self._teachers.close()
        await asyncio.gather(*(self._host.stop(actor) for actor in self._host.actors))


def a_step(step: int, taught: int, plain: int, tokens: int) -> StepBatch:
    """Return a step of `taught` microbatches with a view each, and `plain` ones without."""
    samples = [
        PolicySample(
            f"t{place}", [1] * CONTEXT, [True] * CONTEXT, [0.0] * CONTEXT, 1.0, [step] * CONTEXT
        )
        for place in range(taught + plain)
    ]
    rows = list(range(CONTEXT - 1 - tokens, CONTEXT - 1))
    views = [
        HintedView(sample.trace_id, 0, sample.ids, rows, rows, [1] * tokens)
        for sample in samples[:taught]
    ]
    return StepBatch(step, samples, views, [])


def a_run(teacher_output: str) -> Config:
    """Return the quickstart with another teacher output and one sample per microbatch."""
    overrides = [f"sdpo.teacher_output={teacher_output}", f"trainer.microbatch_tokens={CONTEXT}"]
    return load_config(PRESET, overrides)


async def measure(report: Report, size: Size) -> None:
    supervisor = Supervisor()
    async with MeshHost(supervisor) as host:
        report.figures["transport"] = transport_name()
        await supervisor.guard(moves(report, host, size))
        await supervisor.guard(overlap(report, host, size))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("sdpo_transport")
    size = Size(64, 5, (4, 8), 2, 0.05) if options.quick else Size(300, 15, (2, 4, 8, 16), 5, 0.05)
    asyncio.run(measure(report, size))
    report.finish(options.json)


if __name__ == "__main__":
    main()
