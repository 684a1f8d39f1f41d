"""Cost of the run store: rollouts of 32,000 tokens written and read back.

    python benchmarks/store.py                  1,000 rollouts in 250 groups, with random log-probs
    python benchmarks/store.py --quick          40 rollouts

Each group is written as in a run: its file, and its rows in one transaction, both on disk when the
call returns. The baseline is the same bytes written to plain files with fsync and read back. Files
are read with warm caches on both sides. While the store writes, a task measures every millisecond
how long the event loop was blocked.
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from report import Report, arguments

from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services.store.group_files import group_bytes
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.writing import RunStore

PRESET = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
TOKENS, TURNS, GROUP = 32_000, 16, 4
VOCABULARY = 150_000
MB = 1e6


@dataclass
class Timed:
    """Seconds of a method to write and read, and the bytes on disk."""

    write_s: float = 0.0
    read_s: float = 0.0
    size: int = 0

    def row(self, name: str, tokens: int) -> list[str]:
        speeds = [self.size / MB / seconds for seconds in (self.write_s, self.read_s)]
        return [
            name,
            f"{self.size / tokens:.2f}",
            *(f"{speed:.0f}" for speed in speeds),
            f"{self.write_s:.2f}",
            f"{self.read_s:.2f}",
        ]


def make_group(group_id: int) -> list[Trace]:
    """Make rollouts of many turns: a third of the tokens is sampled, as with verbose tools."""
    rng = np.random.default_rng(group_id)
    return [make_trace(group_id, sample, rng) for sample in range(GROUP)]


def make_trace(group_id: int, sample: int, rng: np.random.Generator) -> Trace:
    size = TOKENS // TURNS
    action = size // 3
    turns = [
        Turn(
            rng.integers(VOCABULARY, size=size - action).tolist(),
            rng.integers(VOCABULARY, size=action).tolist(),
            (-rng.exponential(size=action)).astype(np.float32).astype(float).tolist(),
            [group_id // 8] * action,
            "stop",
        )
        for _ in range(TURNS)
    ]
    words = random.Random(sample).choices(
        ["run", "the", "tests", "again", "error"], k=4 * size // 6
    )
    messages: list[Message] = [{"role": "user", "content": " ".join(words)} for _ in range(TURNS)]
    name = f"train-{group_id:06d}-{sample:03d}"
    return Trace(name, group_id, sample, "toolbox", "train", 0, turns, messages, 0.5, True, [])


async def time_store(root: Path, groups: int) -> tuple[Timed, list[float], dict[str, float]]:
    """Return the store's times, how long the event loop was blocked, and the store's waits."""
    timed, away = Timed(), list[float]()
    with RunStore(root, load_config(PRESET, [])) as store:
        for group_id in range(groups):
            group = make_group(group_id)
            watch = asyncio.create_task(watch_loop(away))
            began = time.perf_counter()
            await store.add_group(group_id, group)
            timed.write_s += time.perf_counter() - began
            watch.cancel()
        waits = store.waits()
    with RunReader(root) as reader:
        for row in reader.groups():
            began = time.perf_counter()
            traces = reader.traces(row.group_id)
            timed.read_s += time.perf_counter() - began
            assert traces == make_group(row.group_id), "a rollout came back as another one"
    return timed, sorted(away), waits


async def watch_loop(away: list[float]) -> None:
    """Record by how many seconds the event loop exceeds each sleep."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        away.append(time.perf_counter() - began - 0.001)


def time_plain(root: Path, contents: Callable[[int], bytes], groups: int) -> Timed:
    """Time files of the same bytes, each on disk before the next one."""
    timed = Timed()
    for group_id in range(groups):
        content, path = contents(group_id), root / f"{group_id}"
        began = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        timed.write_s += time.perf_counter() - began
        began = time.perf_counter()
        found = path.read_bytes()
        timed.read_s += time.perf_counter() - began
        timed.size += len(found)
        path.unlink()
    return timed


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    options = arguments("What the store of a run costs.").parse_args()
    report = Report("store")
    groups = 10 if options.quick else 250
    tokens = groups * GROUP * TOKENS
    with TemporaryDirectory(dir=".") as folder:
        root = Path(folder)
        store, away, waits = asyncio.run(time_store(root / "run", groups))
        files = [path for path in (root / "run").rglob("*") if path.is_file()]
        store.size = sum(path.stat().st_size for path in files)
        plain = time_plain(root, lambda group_id: group_bytes(make_group(group_id)), groups)
    columns = ("way", "bytes a token", "write MB/s", "read MB/s", "write s", "read s")
    rows = [
        store.row("store", tokens),
        plain.row("plain files of the same bytes", tokens),
    ]
    title = f"{groups * GROUP} rollouts of {TOKENS} tokens in {groups} groups"
    report.print_table(title, columns, rows)
    print(f"the event loop was away {1e3 * quantile(away, 0.99):.1f} ms (p99)")
    report.figures = {
        "bytes per token": store.size / tokens,
        "write MB/s": store.size / MB / store.write_s,
        "read MB/s": store.size / MB / store.read_s,
        "plain write MB/s": plain.size / MB / plain.write_s,
        "plain read MB/s": plain.size / MB / plain.read_s,
        "store write s": store.write_s,
        "store read s": store.read_s,
        "event loop away p50 s": quantile(away, 0.5),
        "event loop away p99 s": quantile(away, 0.99),
        "store/wait_p99_s": waits["store/wait_p99_s"],
    }
    report.ratios = {
        "write_over_plain": store.write_s / plain.write_s,
        "read_over_plain": store.read_s / plain.read_s,
    }
    report.finish(options.json)


if __name__ == "__main__":
    main()
