"""A training server with fifteen ordinary clients and a hostile one, as a command on a folder.

    p99_over_quiet     99th percentile of an operation's seconds with the hostile client over that
                       without it; bar: 2
    operations_lost    operations of the others that were refused, failed or never answered; bar: 0
    memory_gb          most memory of all processes of the server together (PSS); bar: 4
    disk_gb            size of the server's folder at the end

Each ordinary client trains an adapter and samples, in turns, and waits half a second between. The
hostile one tries every attack of serve_attacks.py, again and again. Ten minutes with it, and a
fifth of that before it for comparison; --quick has two minutes in all, of the same load.
The exit status is 1 where a bar is missed, or where the server has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import Report, arguments
from serve import CONFIG, config_of
from serve_attacks import attack_until
from serve_clients import Client, Load
from serve_peer import free_port, serving

CLIENTS = 15
THINKING_S = 0.5
WITH_S, WITHOUT_S = 600.0, 120.0
QUICK_WITH_S, QUICK_WITHOUT_S = 80.0, 40.0
ANSWER_S = 300.0
"""Seconds after which an operation counts as never answered."""
BARS = {"p99_over_quiet": 2.0, "operations_lost": 0.0, "memory_gb": 4.0}
STEP, TOKENS = Load(1, 2, 16), 16


@dataclass
class Answers:
    """What the ordinary clients saw."""

    took: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def p99(self) -> float:
        return sorted(self.took)[int(0.99 * len(self.took))]


class OrdinaryClient(Client):
    """A client with a key of its own that waits for each answer."""

    async def work(self, until: float, answers: Answers) -> None:
        """Train and sample in turns until a time of the monotonic clock."""
        turn = 0
        while time.monotonic() < until:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await (self.sample(TOKENS) if turn % 2 else self.step(STEP))
            except (AssertionError, TimeoutError, httpx.HTTPError) as error:
                answers.lost.append(f"{type(error).__name__}: {str(error)[:300]}")
            answers.took.append(time.monotonic() - begun)
            turn += 1
            await asyncio.sleep(THINKING_S)

    async def _result(self, accepted: Any) -> None:
        body = {"request_id": accepted["request_id"]}
        while True:
            answer = await self._http.post("/api/v1/retrieve_future", json=body)
            assert answer.status_code == 200, answer.text
            assert b'"error"' not in answer.content, answer.content
            if b'"try_again"' not in answer.content:
                return


async def ordinary_clients(url: str, seconds: float, first: int) -> Answers:
    """Run the ordinary clients for some seconds, with models of their own."""
    answers = Answers()
    async with contextlib.AsyncExitStack() as opened:
        clients = []
        for number in range(first, first + CLIENTS):
            http = httpx.AsyncClient(
                base_url=url, timeout=ANSWER_S, headers={"x-api-key": f"tml-{number}"}
            )
            clients.append(OrdinaryClient(await opened.enter_async_context(http), number))
        for one in clients:
            await one.open()
        until = time.monotonic() + seconds
        await asyncio.gather(*(one.work(until, answers) for one in clients))
    return answers


@contextmanager
def hostile_client(url: str, seconds: float) -> Iterator[dict[str, int]]:
    """Attack for a block, from a process of its own; yields how often each attack was made."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    attacker = context.Process(target=attack_until, args=(url, time.time() + seconds, sender))
    attacker.start()
    sender.close()
    made: dict[str, int] = {}
    try:
        yield made
        made |= receiver.recv()
        attacker.join()
    finally:
        attacker.kill()


class MemoryWatch:
    """Measures the memory of a process and all it started, once a second, on a thread."""

    def __init__(self, pid: int) -> None:
        self.most = 0.0
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(1):
            found = 0.0
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [self._process, *self._process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found += one.memory_full_info().pss / 1e9
            self.most = max(self.most, found)


def is_alive(url: str) -> bool:
    """Return whether a server still serves."""
    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def measure(report: Report, with_s: float, without_s: float) -> None:
    """Measure without and with the hostile client, of one server."""
    with tempfile.TemporaryDirectory() as name:
        place, url = Path(name), f"http://127.0.0.1:{free_port()}"
        config_of(place / "policy")
        words = ["--output", str(place / "served"), "--port", url.rpartition(":")[2]]
        sets = [f"policy.path={place / 'policy'}", "serve.base_model=base"]
        words += [word for one in sets for word in ("--set", one)]
        command = [
            str(Path(sys.executable).with_name("composer-mesh")),
            "serve",
            str(CONFIG),
            *words,
        ]
        with serving(command, url, place / "log", None) as pid, MemoryWatch(pid) as memory:
            quiet = asyncio.run(ordinary_clients(url, without_s, 0))
            print(f"without: {len(quiet.took)} operations, p99 {quiet.p99():.2f} s", flush=True)
            with hostile_client(url, with_s) as made:
                loud = asyncio.run(ordinary_clients(url, with_s, CLIENTS))
            alive = is_alive(url)
        print((place / "log").read_text()[-4000:], file=sys.stderr)
        size = sum(one.stat().st_size for one in (place / "served").rglob("*") if one.is_file())
    lost = [*quiet.lost, *loud.lost, *([] if alive else ["the server ended"])]
    for text in lost[:10]:
        print(f"lost: {text}", file=sys.stderr)
    report.figures |= {
        "operations without": len(quiet.took),
        "operations with": len(loud.took),
        "p99_s without": quiet.p99(),
        "p99_s with": loud.p99(),
        "disk_gb": size / 1e9,
        **{f"attacks: {name}": count for name, count in made.items()},
    }
    report.ratios |= {
        "p99_over_quiet": loud.p99() / quiet.p99(),
        "operations_lost": float(len(lost)),
        "memory_gb": memory.most,
    }


def main() -> int:
    given = arguments(__doc__ or "").parse_args()
    report = Report("serve_hostile")
    measure(
        report,
        QUICK_WITH_S if given.quick else WITH_S,
        QUICK_WITHOUT_S if given.quick else WITHOUT_S,
    )
    rows = [(name, f"{value:.4g}") for name, value in report.figures.items()]
    report.print_table("fifteen clients and a hostile one", ("", "value"), rows)
    report.finish(given.json)
    missed = [name for name, bar in BARS.items() if report.ratios[name] > bar]
    for name in missed:
        print(f"{name} is {report.ratios[name]:.4g}, above {BARS[name]:g}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
