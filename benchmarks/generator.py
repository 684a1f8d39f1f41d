"""The embedded engine against transformers' own generation: tokens/s at 1, 8 and 64 requests.

    python benchmarks/generator.py [--quick] [--json FILE]

The same model, prompts and number of sampled tokens, one thread, alternating, with prompts that no
engine has seen before. `generate` gets one batch padded on the left; its ratio is to the faster of
its caches, with the log-probs that the engine always returns. Continuous batching is warm. A second
table is an agentic load (generator_turns.py), with and without prefix sharing. Seconds are CPU
time: with one thread they equal the time on an idle machine.
"""

import asyncio
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from generator_turns import Load, embedded_engines, play
from generator_ways import (
    ROWS,
    SMALL,
    TINY,
    Size,
    Way,
    continuous,
    embedded,
    generate,
    prompts_of,
)
from report import Report, arguments

REQUESTS = (1, 8, 64)
DYNAMIC, STATIC = "generate, dynamic cache", "generate, static cache"
CONTINUOUS = "continuous batching"
ROUNDS = 3
"""Counted rounds of the agentic load."""


@dataclass(frozen=True)
class Effort:
    """Rounds after an uncounted one, new tokens of a request, tokens of a long prompt."""

    rounds: int
    new: int
    longest: int


def compare(report: Report, size: Size, effort: Effort) -> None:
    """Compare one model at every number of requests; lowers the ratios to the worst seen."""
    with ExitStack() as stack:
        ways = {
            "embedded": embedded(size),
            DYNAMIC: generate(size, cache="dynamic"),
            STATIC: generate(size, cache="static"),
        }
        ways[CONTINUOUS] = stack.enter_context(continuous(size))
        took = {requests: rounds(ways, size, requests, effort) for requests in REQUESTS}
    rows = []
    for name in ways:
        row = [name]
        for requests in REQUESTS:
            speed = requests * effort.new / statistics.median(took[requests][name])
            ahead = advantage(took[requests], name)
            report.figures[f"{size.name} {name} tokens_per_s at {requests}"] = round(speed)
            row += [f"{speed:,.0f}", "" if name == "embedded" else f"{ahead:.2f}"]
            lower(report, name, ahead)
        rows.append(row)
    columns = [text for requests in REQUESTS for text in (str(requests), "x")]
    title = (
        f"{size.name}, {size.layers} layers of {size.width}: tokens/s at so many requests; the "
        "embedded engine is x times as fast"
    )
    report.print_table(title, ["", *columns], rows)


def rounds(
    ways: dict[str, Way], size: Size, requests: int, effort: Effort
) -> dict[str, list[float]]:
    """Return the seconds of each counted round of each engine."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(effort.rounds + 1):
        prompts = prompts_of(size, requests, effort.longest, seed=1000 * requests + number)
        for name, way in ways.items():
            began = time.process_time()
            way(prompts, effort.new)
            took[name].append(time.process_time() - began)
    return {name: times[1:] for name, times in took.items()}


def advantage(took: dict[str, list[float]], name: str) -> float:
    """Return the peer's time over the engine's: the median over rounds."""
    pairs = zip(took[name], took["embedded"], strict=True)
    return statistics.median(peer / own for peer, own in pairs)


def lower(report: Report, name: str, ahead: float) -> None:
    ratio = {
        DYNAMIC: "embedded_over_generate",
        STATIC: "embedded_over_generate",
        CONTINUOUS: "embedded_over_continuous",
    }.get(name)
    if ratio is not None:
        report.ratios[ratio] = min(ahead, report.ratios.get(ratio, ahead))


async def sharing(report: Report, size: Size, load: Load) -> None:
    """Measure an agentic load, with and without prefix sharing, after an uncounted round."""
    took: dict[str, list[float]] = {"shared": [], "computed for each": []}
    async with (
        embedded_engines(size, 1, ROWS, load.context, None) as shared,
        embedded_engines(size, 1, ROWS, load.context, 0) as alone,
    ):
        for _ in range(ROUNDS + 1):
            for times, engines in zip(took.values(), (shared, alone), strict=True):
                began = time.process_time()
                await play(load, engines, pause_s=0.0)
                times.append(time.process_time() - began)
    rows = []
    for name, times in took.items():
        speed = load.sampled / statistics.median(times[1:])
        report.figures[f"{size.name} prompts {name} tokens_per_s"] = round(speed)
        rows.append([name, f"{speed:,.0f}"])
    pairs = zip(took["shared"][1:], took["computed for each"][1:], strict=True)
    ratio = statistics.median(alone_s / shared_s for shared_s, alone_s in pairs)
    report.ratios[f"sharing_over_none_{size.name}"] = ratio
    what = f"{load.groups} groups of {load.members} sessions, {load.turns} turns"
    report.print_table(f"{size.name}: {what}", ["what prompts have in common", "tokens/s"], rows)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    effort = Effort(3, 16, 48) if options.quick else Effort(7, 48, 128)
    report = Report("generator")
    for size in (TINY, SMALL):
        compare(report, size, effort)
    for size in (TINY, SMALL):
        asyncio.run(sharing(report, size, Load(3 if options.quick else 6, 4, 8, 100, 24, 16, 20)))
    report.finish(options.json)


if __name__ == "__main__":
    main()
