"""CPU cost of supervision for a run without failures.

    python benchmarks/supervision.py [--quick] [--json FILE]

As many actors as the quickstart has, idle, so that all CPU is supervision's own: plain Monarch;
ours, with its watches on processes and its heartbeats; and ours with the live status of a run,
which queries each actor every other second. Each variant in a fresh process, alternating. The ratio
is its CPU above plain Monarch over the two cores that the quickstart keeps busy: a step is longer
by that share when every cycle is taken from it.
"""

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

from measuring import in_a_process
from report import Report, arguments

WAYS = ("monarch", "supervised", "watched")
ACTORS = 9
"""Actor processes of the quickstart."""
CORES = 2
"""Cores that a quickstart step keeps busy."""
SETTLE_S = 3.0


def main() -> int:
    """Measure each variant in turn; return 1 where the claim does not hold."""
    given = arguments(__doc__.splitlines()[0]).parse_args()
    seconds, rounds = (4.0, 2) if given.quick else (20.0, 3)
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            shares[way].append(in_a_process(measured, way, seconds))
    report, middle = Report("supervision"), {}
    for way, found in shares.items():
        middle[way] = report.figures[f"{way}_cpu_share"] = statistics.median(found)
    rows = [[way, f"{middle[way]:.2%}", _range(shares[way])] for way in WAYS]
    title = f"CPU of {ACTORS + 1} idle processes, of one core"
    report.print_table(title, ["way", "median", "least to most"], rows)
    for way in WAYS[1:]:
        report.ratios[f"{way}_over_step"] = (middle[way] - middle["monarch"]) / CORES
    report.finish(given.json)
    return int(report.ratios["supervised_over_step"] >= 0.01)


def _range(found: list[float]) -> str:
    return f"{min(found):.2%} to {max(found):.2%}"


def measured(way: str, seconds: float) -> float:
    """Return CPU seconds per second of this process and its actors while idle."""
    # Child processes import the actors by name, and inherit only the environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["OMP_NUM_THREADS"] = "1"
    if way == "monarch":
        return asyncio.run(_plain(seconds))
    from composer_mesh.mesh.environment import prepare_environment

    prepare_environment()
    return asyncio.run(_supervised(seconds, watched=way == "watched"))


async def _plain(seconds: float) -> float:
    from monarch.actor import this_host
    from service_actors import Echo

    meshes = [this_host().spawn_procs(name=f"echo_{place}") for place in range(ACTORS)]
    actors = [procs.spawn("echo", Echo) for procs in meshes]
    pids = [(await actor.describe.call_one())["pid"] for actor in actors]
    share = await _share(pids, seconds)
    for procs in meshes:
        await procs.stop()
    return share


async def _supervised(seconds: float, watched: bool) -> float:
    from service_actors import Echo

    from composer_mesh.configs.supervision import SupervisionConfig
    from composer_mesh.mesh.heartbeat import HeartbeatRules
    from composer_mesh.mesh.spawn import MeshHost
    from composer_mesh.mesh.supervision import Supervisor
    from composer_mesh.mesh.waiting import cancel_and_wait
    from composer_mesh.services.run.watch import STATUS_EVERY_S

    rules = SupervisionConfig()
    beats = HeartbeatRules(rules.heartbeat_s, rules.hang_s)
    async with MeshHost(Supervisor(lambda *_, **__: None), heartbeat=beats) as host:
        names = [f"echo-{place}" for place in range(ACTORS)]
        actors = await asyncio.gather(*(host.spawn(name, Echo) for name in names))

        async def look() -> None:
            while True:
                await asyncio.gather(*(actor.call("describe") for actor in actors))
                await asyncio.sleep(STATUS_EVERY_S)

        looking = [asyncio.create_task(look())] if watched else []
        share = await _share([actor.pid for actor in actors], seconds)
        await cancel_and_wait(looking)
    return share


async def _share(pids: list[int], seconds: float) -> float:
    pids = [os.getpid(), *pids]
    await asyncio.sleep(SETTLE_S)
    began, used = time.monotonic(), sum(map(_cpu_s, pids))
    await asyncio.sleep(seconds)
    return (sum(map(_cpu_s, pids)) - used) / (time.monotonic() - began)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond where the kernel reports them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
