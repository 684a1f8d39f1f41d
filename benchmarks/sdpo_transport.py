"""Transfer time and size of teacher outputs.

    python benchmarks/sdpo_transport.py [--quick] [--json FILE]

One teacher output moves from one process to another, by a registered buffer that is read
one-sidedly, as the answer of an endpoint, and, for scale, by a copy inside one process. Methods
alternate, so that other load affects all of them.
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
from sdpo_actors import Shape, SignalReader, SignalSender  # noqa: E402

from composer_mesh.configs.load import load_config  # noqa: E402
from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.spawned import SpawnedActor  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402
from composer_mesh.mesh.transport import BufferHandle, transport_name  # noqa: E402

PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
SIGNALS = ("hidden", "topk", "full")
HIDDEN, VOCABULARY = 1_024, 32_768
MIB = 1 << 20

Move = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Size:
    """Tokens of a moved teacher output, and repeats."""

    tokens: int
    repeats: int


async def moves(report: Report, host: MeshHost, size: Size) -> None:
    """Measure bytes and times of each kind of teacher output, with each method."""
    sender = await host.spawn("signal_sender", SignalSender)
    reader = await host.spawn("signal_reader", SignalReader)
    rows = []
    for teacher_output in SIGNALS:
        config = load_config(PRESET, [f"sdpo.teacher_output={teacher_output}"]).sdpo
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


async def measure(report: Report, size: Size) -> None:
    supervisor = Supervisor()
    async with MeshHost(supervisor) as host:
        report.figures["transport"] = transport_name()
        await supervisor.guard(moves(report, host, size))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("sdpo_transport")
    size = Size(64, 5) if options.quick else Size(300, 15)
    asyncio.run(measure(report, size))
    report.finish(options.json)


if __name__ == "__main__":
    main()
