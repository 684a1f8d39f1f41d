"""Transfer time of a version of the weights by every transport, compared with memcpy.

    python benchmarks/weight_sync.py [--quick] [--json FILE]

Two processes of one host: one publishes, the other pulls. Compared methods alternate, with a memcpy
of the same bytes in each turn, so that other load affects all of them. The first turn (memory is
allocated, registered, mapped) is reported separately, the others by their median. torchstore alone
is its own put_state_dict and get_state_dict; it is an extra (see docs/weight-sync.md), and without
it its rows are left out, and its ratio is reported as missing. How much of a sync a run overlaps
with its training is measured by runs: `time/weight_sync_s` and `async.py`.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Child processes import the actors by name, and inherit only the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from report import Report, arguments  # noqa: E402
from weight_sync_actors import Source, Target, use_async_controller  # noqa: E402

from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.spawned import SpawnedActor  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402
from composer_mesh.mesh.transport import transport_name  # noqa: E402
from composer_mesh.mesh.weights.choice import Transport  # noqa: E402
from composer_mesh.mesh.weights.remote_transports import REPAIR, why_no_torchstore  # noqa: E402

ALONE = "torchstore by itself"
MB = 1_000_000
GROUPS = (("shm",), ("shm, checksums",), ("torchstore",), ("disk",), ("rdma", ALONE))
"""Methods that alternate. Not all at once, because each holds several copies of the weights."""

Times = dict[str, list[float]]
Move = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Size:
    """Bytes of the weights, and counted turns."""

    nbytes: int
    turns: int

    @property
    def name(self) -> str:
        return f"{self.nbytes // MB} MB"


class Ways:
    """Both parts of each method between the two processes: offer and take."""

    def __init__(self, source: SpawnedActor, target: SpawnedActor, folder: Path) -> None:
        self._source, self._target, self._folder = source, target, folder
        self._version = 0

    async def offer_and_take(self, way: str) -> tuple[float, float]:
        """Return the seconds of both parts, as seen by the caller."""
        return await (self._alone() if way == ALONE else self._ours(way))

    async def _alone(self) -> tuple[float, float]:
        put_s, _ = await seconds(self._source.call("put", deadline_s=300))
        get_s, _ = await seconds(self._target.call("get", deadline_s=300))
        return put_s, get_s

    async def _ours(self, way: str) -> tuple[float, float]:
        self._version += 1
        transport = Transport(way.split(",")[0], folder=self._folder)  # type: ignore[arg-type]
        offering = self._source.call("publish", way, transport, self._version, deadline_s=300)
        publish_s, handle = await seconds(offering)
        pull_s, version = await seconds(self._target.call("pull", way, handle, deadline_s=300))
        assert version == self._version
        return publish_s, pull_s


async def seconds(work: Awaitable[object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result


async def measure(report: Report, host: MeshHost, size: Size, folder: Path) -> None:
    """Measure all methods at one size, which is part of the figures' names."""
    number = size.nbytes // MB
    source, target = await asyncio.gather(
        host.spawn(f"source-{number}", Source), host.spawn(f"target-{number}", Target)
    )
    nbytes = await source.call("load", size.nbytes)
    await target.call("load", nbytes)
    ways = Ways(source, target, folder)
    rows = []
    for group in GROUPS:
        present = [way for way in group if why_no_torchstore() is None or "torchstore" not in way]
        times = await in_turn(ways, target, present, size.turns) if present else {}
        rows += [row(report, size, way, times) for way in present]
        await asyncio.gather(source.call("close"), target.call("forget"))
    await side_costs(report, target, size)
    await asyncio.gather(host.stop(source), host.stop(target))
    columns = [f"{size.name}", "offer ms", "take ms", "first ms", "GB/s", "take / memcpy"]
    report.print_table(f"{size.name} of float32; medians", columns, rows)


async def in_turn(ways: Ways, target: SpawnedActor, present: list[str], turns: int) -> Times:
    """Return the seconds of both parts of each method, and of a memcpy, once per turn."""
    found: Times = {f"{way} {half}": [] for way in present for half in ("offer", "take")}
    found["memcpy"] = []
    for _ in range(turns + 1):
        for way in present:
            offered, taken = await ways.offer_and_take(way)
            found[f"{way} offer"].append(offered)
            found[f"{way} take"].append(taken)
            found["memcpy"].append(await target.call("memcpy"))
    return found


def row(report: Report, size: Size, way: str, times: Times) -> list[str]:
    """Return one row of the table, and record its figures."""
    halves = [times[f"{way} offer"], times[f"{way} take"]]
    offer, take = (statistics.median(half[1:]) for half in halves)
    first, memcpy = sum(half[0] for half in halves), statistics.median(times["memcpy"][1:])
    names = ("offer_ms", "take_ms", "first_ms", "memcpy_ms")
    for name, value in zip(names, (offer, take, first, memcpy), strict=True):
        report.figures[f"{size.name} {way} {name}"] = round(value * 1e3, 2)
    milliseconds = [f"{value * 1e3:,.1f}" for value in (offer, take, first)]
    return [way, *milliseconds, f"{size.nbytes / take / 1e9:.2f}", f"{take / memcpy:.2f}"]


async def side_costs(report: Report, target: SpawnedActor, size: Size) -> None:
    """Measure the cost of checksums, and of detecting that a tensor is unchanged."""
    for name in ("memcpy", "prove", "compare"):
        taken = [await target.call(name) for _ in range(size.turns + 1)]
        report.figures[f"{size.name} {name}_ms"] = round(statistics.median(taken[1:]) * 1e3, 2)


def ratios(report: Report, size: Size) -> None:
    """Add the ratios of the claims, at the size that they are made for."""

    def of(name: str) -> float:
        return float(report.figures[f"{size.name} {name}"])

    report.ratios["shm_over_memcpy"] = of("shm take_ms") / of("shm memcpy_ms")
    report.ratios["checksum_over_memcpy"] = of("prove_ms") / of("memcpy_ms")
    report.ratios["unchanged_over_memcpy"] = of("compare_ms") / of("memcpy_ms")
    if (why := why_no_torchstore()) is not None:
        report.missing["torchstore_over_rdma"] = f"{why}: {REPAIR}"
    else:
        theirs = of(f"{ALONE} offer_ms") + of(f"{ALONE} take_ms")
        ratio = theirs / (of("rdma offer_ms") + of("rdma take_ms"))
        report.ratios["torchstore_over_rdma"] = ratio


async def run(report: Report, sizes: list[Size]) -> None:
    supervisor = Supervisor()
    with tempfile.TemporaryDirectory(prefix="composer-mesh-bench-") as folder:
        async with MeshHost(supervisor) as host:
            report.figures["rdma_backend"] = transport_name()
            if why_no_torchstore() is None:
                await open_torchstore(host)
            for size in sizes:
                await supervisor.guard(measure(report, host, size, Path(folder)))
    ratios(report, sizes[0])


async def open_torchstore(host: MeshHost) -> None:
    """Start torchstore: a controller and one volume, in their own processes."""
    assert host.here.mesh is not None
    os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(10 << 30))
    import torchstore as ts

    use_async_controller()
    await ts.initialize()


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("weight_sync")
    sizes = [Size(200 * MB, 5)] if options.quick else [Size(500 * MB, 9), Size(2000 * MB, 3)]
    asyncio.run(run(report, sizes))
    report.finish(options.json)


if __name__ == "__main__":
    main()
