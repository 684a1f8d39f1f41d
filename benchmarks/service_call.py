"""Cost of a call through a service: against a raw Monarch call, and against Ray's actor pool.

    python benchmarks/service_call.py [--quick] [--json FILE]

Alone: one call at a time, alternating, so that other load affects all methods. Raw calls go to the
service's own replicas in rotation; spawned ones have a deadline and are notified of their actor's
death. Together: calls per second, many at once; Ray's pool gives each actor one at a time. Ray
comes from the extra `bench`; without it, its columns are left out, and its ratio is reported as
missing.
"""

import asyncio
import importlib.util
import logging
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Child processes import the actors by name, and inherit only the environment.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

from report import Report, arguments  # noqa: E402
from service_actors import Echo, PlainEcho  # noqa: E402

from composer_mesh.mesh.spawn import MeshHost  # noqa: E402
from composer_mesh.mesh.supervision import Supervisor  # noqa: E402
from composer_mesh.services import service  # noqa: E402
from composer_mesh.services.service import Service  # noqa: E402

REPLICAS = 2
PAYLOADS = {"1 KiB": 1 << 10, "64 KiB": 1 << 16}
CLAIMED = "1 KiB"
"""The payload of the ratios: a short question."""

Way = Callable[[bytes], Awaitable[object]]


@dataclass(frozen=True)
class Size:
    """Calls of each method: one at a time, uncounted ones before them, and at once."""

    alone: int
    warm: int
    together: int


def ways_of(pool: Service, rays: "RayPool | None") -> dict[str, Way]:
    """Return the methods of one call, by their names."""
    turns = count()

    def actor() -> Any:
        return pool.replicas[next(turns) % REPLICAS].actor

    ours: dict[str, Way] = {
        "raw": lambda payload: actor().ref.echo.call_one(payload),
        "spawned": lambda payload: actor().call("echo", payload),
        "service": lambda payload: pool.echo(payload),
    }
    return ours if rays is None else {**ours, "ray": rays.call}


class RayPool:
    """Ray's own pool of as many actors."""

    def __init__(self, ray: Any) -> None:
        from ray.util import ActorPool

        remote = ray.remote(num_cpus=0)(PlainEcho)
        self._pool = ActorPool([remote.remote() for _ in range(REPLICAS)])

    async def call(self, payload: bytes) -> object:
        self._pool.submit(lambda actor, value: actor.echo.remote(value), payload)
        return self._pool.get_next()

    def many(self, payload: bytes, calls: int) -> object:
        return list(self._pool.map(lambda actor, v: actor.echo.remote(v), [payload] * calls))


@contextmanager
def ray_pool() -> Iterator[RayPool | None]:
    """Yield Ray's pool while a block runs; None where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        yield None
        return
    import ray

    ray.init(
        num_cpus=REPLICAS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 << 20,
        # The environment above is for Monarch's children; Ray's find the actor by this path.
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    try:
        yield RayPool(ray)
    finally:
        ray.shutdown()


async def latencies(ways: dict[str, Way], payload: bytes, size: Size) -> dict[str, list[float]]:
    """Return the seconds of each call of each method; rounds rotate the method that starts."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(size.warm + size.alone):
        for name in order:
            began = time.perf_counter()
            await ways[name](payload)
            if number >= size.warm:
                found[name].append(time.perf_counter() - began)
        order.append(order.pop(0))
    return found


async def rate(way: Way, rays: "RayPool | None", payload: bytes, calls: int) -> float:
    """Return the calls per second, many at once, of the best of three rounds."""
    best = 0.0
    for _ in range(3):
        began = time.perf_counter()
        if rays is not None and way == rays.call:
            rays.many(payload, calls)
        else:
            await asyncio.gather(*(way(payload) for _ in range(calls)))
        best = max(best, calls / (time.perf_counter() - began))
    return best


async def compare(
    report: Report, pool: Service, rays: "RayPool | None", payload: str, size: Size
) -> None:
    """Compare one payload: a table, its figures, and the ratios for the claimed payload."""
    content = os.urandom(PAYLOADS[payload])
    ways = ways_of(pool, rays)
    took = await latencies(ways, content, size)
    rates = {name: await rate(way, rays, content, size.together) for name, way in ways.items()}
    rows = []
    for name, times in took.items():
        p50, p99 = (quantile * 1e6 for quantile in (statistics.median(times), _p99(times)))
        report.figures[f"{name} {payload} p50_us"] = round(p50, 1)
        report.figures[f"{name} {payload} p99_us"] = round(p99, 1)
        report.figures[f"{name} {payload} calls_per_s"] = round(rates[name])
        rows.append([name, f"{p50:,.0f}", f"{p99:,.0f}", f"{rates[name]:,.0f}"])
    title = f"{payload}, {REPLICAS} replicas"
    report.print_table(title, ["way", "p50 us", "p99 us", "calls/s"], rows)
    if payload == CLAIMED:
        medians = {name: statistics.median(times) for name, times in took.items()}
        report.ratios["service_over_raw"] = medians["service"] / medians["raw"]
        if "ray" in medians:
            report.ratios["ray_over_service"] = medians["ray"] / medians["service"]
        else:
            why = "ray is not installed: pip install 'composer-mesh[bench]'"
            report.missing["ray_over_service"] = why


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


async def measure(report: Report, rays: RayPool | None, size: Size) -> None:
    supervisor = Supervisor()
    async with MeshHost(supervisor) as host:
        pool = await service.spawn(Echo, n=REPLICAS, host=host)
        for payload in PAYLOADS:
            await supervisor.guard(compare(report, pool, rays, payload, size))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("service_call")
    size = Size(500, 50, 1_000) if options.quick else Size(2_000, 200, 5_000)
    with ray_pool() as rays:
        asyncio.run(measure(report, rays, size))
    report.finish(options.json)


if __name__ == "__main__":
    main()
