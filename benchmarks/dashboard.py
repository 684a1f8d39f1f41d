"""How fast the dashboard is with many runs and a very long one, and what it costs a run it watches.

    page_s        seconds to the first paint of 200 runs in Chromium, or of the answer without it
    filter_s      seconds to filter 100,000 rollouts
    rss_mb        memory of the server at the end; rss_growth is that over the one after a warm-up
    cost_to_run   CPU seconds of the server over those of the steps that three open pages watch

The last one trains the quickstart, shortened, and watches every other block of steps; the median
steps of both are figures too, but they differ from block to block by more than the cost. `--quick`
has 50 runs, 20,000 rollouts and fewer steps.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from dashboard_runs import PRESET, large_run, small_run
from report import Report, arguments

from composer_mesh.services.directory.report import METRICS_FILE, read_metrics

COMMAND = [sys.executable, "-m", "composer_mesh"]
BAR_S = 1.0
REPEATS = 5
FILTERS = (
    "?outcome=failed",
    "?error=missing_key&sort=-reward",
    "?min_reward=0.5&sort=tokens&page=40",
    "?step=1500",
)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The command, as a user starts it; yields its address and its process."""
    command = [*COMMAND, "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None, line
            yield found.group(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


PAINTED = (
    "new Promise(done => new PerformanceObserver("
    "list => done(list.getEntries()[0].startTime)).observe({type: 'paint', buffered: true}))"
)


def first_paint(base: str) -> float | None:
    """Seconds to the first contentful paint of the runs in a fresh Chromium; None without one."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return None
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        path = Path("/usr/bin/chromium")
        if not path.exists():
            return None
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        page = browser.new_page()
        page.goto(base, wait_until="load")
        painted = page.evaluate(PAINTED)
        browser.close()
    return float(painted) / 1000


def pages(folder: Path, report: Report, visits: int) -> None:
    """Measure pages and filters, and the memory of the server over many visits."""
    with served(folder) as (base, process), httpx.Client(base_url=base, timeout=60) as browser:
        cold = seconds(lambda: browser.get("/").raise_for_status())
        while "more are being read" in browser.get("/").text:
            pass
        warm = [seconds(lambda: browser.get("/").raise_for_status()) for _ in range(REPEATS)]
        painted = first_paint(base)

        def get(path: str) -> float:
            return seconds(lambda: browser.get(path).raise_for_status())

        filters = {
            query: statistics.median(get(f"/runs/large/rollouts{query}") for _ in range(REPEATS))
            for query in FILTERS
        }
        _visit(browser, 60)
        before = process.memory_info().rss / 1e6
        _visit(browser, visits)
        after = process.memory_info().rss / 1e6
    answer = statistics.median(warm)
    report.figures |= {
        "page_cold_s": cold,
        "page_answer_s": answer,
        "page_painted_in": "Chromium" if painted is not None else "no browser: the answer",
        "rss_mb": after,
        "rss_growth": after / before,
        **{f"filter {query}": value for query, value in filters.items()},
    }
    report.ratios |= {
        "page_s": max(cold, painted if painted is not None else answer),
        "filter_s": max(filters.values()),
    }
    rows = [
        ("runs, first visit after the start", f"{cold:.3f} s"),
        ("runs, answer", f"{answer:.3f} s"),
        ("runs, first paint in Chromium", "-" if painted is None else f"{painted:.3f} s"),
        *((f"rollouts{query}", f"{value:.3f} s") for query, value in filters.items()),
        (f"memory after {visits} visits", f"{after:.0f} MB ({after / before:.2f} of before)"),
    ]
    report.print_table("dashboard: pages", ("", "median"), rows)


def _visit(browser: httpx.Client, visits: int) -> None:
    for number in range(visits):
        group = number * 7 % 2000
        for path in (
            "/",
            f"/runs/run-{number % 40:03d}/",
            f"/runs/large/rollouts?page={number}",
            f"/runs/large/rollouts/{group}/{number % 8}?colour=logprob",
        ):
            browser.get(path).raise_for_status()


def cost(folder: Path, report: Report, blocks: int, steps: int) -> None:
    """Measure what a server takes to show a run that trains in three open pages."""
    root = folder / "watched"
    sets = {
        "run.steps": 10_000,  # it is ended when all is measured
        "policy.warm_start.steps": 60,
        "policy.warm_start.demonstrations": 400,
        "policy.cache_dir": folder / "policies",
        "eval.episodes": 2,
    }
    overrides = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [*COMMAND, "train", str(PRESET), *overrides, "--output", str(root)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            _until(root, 5)
            watched, alone, spent, wall = list[float](), list[float](), 0.0, 0.0
            for _ in range(blocks):
                alone += _steps(root, steps)
                with watching(folder) as server:
                    _steps(root, 1)  # what a server reads when it starts is no cost of a step
                    before, began = server.cpu_times(), time.monotonic()
                    watched += _steps(root, steps)
                    after = server.cpu_times()
                    spent += after.user + after.system - before.user - before.system
                    wall += time.monotonic() - began
        finally:
            run.terminate()
            run.wait(120)
    ratio = spent / wall
    report.figures |= {
        "server_cpu_s": spent,
        "watched_s": wall,
        "step_alone_s": statistics.median(alone),
        "step_watched_s": statistics.median(watched),
        "steps_of_each": len(alone),
    }
    report.ratios["cost_to_run"] = ratio
    rows = [
        ("not watched", f"{statistics.median(alone):.3f} s"),
        ("watched", f"{statistics.median(watched):.3f} s"),
        ("CPU of the server while it watches", f"{ratio:.2%} of a core"),
    ]
    report.print_table(f"dashboard: median step, {len(alone)} each", ("", "step"), rows)


@contextmanager
def watching(folder: Path) -> Iterator[psutil.Process]:
    """A server with three open pages of the run; yields its process."""
    with served(folder) as (base, process):
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, f"{base}/runs/watched/{part}live"],
                stdout=subprocess.DEVNULL,
            )
            for part in ("", "mesh/", "events/")
        ]
        try:
            yield process
        finally:
            for one in readers:
                one.kill()
                one.wait()


READER = "import sys, urllib.request\nfor line in urllib.request.urlopen(sys.argv[1]): pass\n"


def _steps(root: Path, steps: int) -> list[float]:
    """The seconds of the next steps; the two after a change are left out."""
    before = _done(root)
    _until(root, before + steps + 2)
    found = read_metrics(root / METRICS_FILE)[before + 2 :]
    return [float(one["time/step_s"]) for one in found[:steps]]


def _until(root: Path, steps: int) -> None:
    until = time.monotonic() + 600
    while _done(root) < steps:
        assert time.monotonic() < until, f"{root} has not done {steps} steps"
        time.sleep(0.1)


def _done(root: Path) -> int:
    file = root / METRICS_FILE
    return len(read_metrics(file)) if file.exists() else 0


def main() -> None:
    parser = arguments("What the dashboard's pages take, and what it costs a run that it watches.")
    parser.add_argument("--part", choices=("pages", "cost", "both"), default="both")
    options = parser.parse_args()
    runs, rollouts, visits = (50, 20_000, 30) if options.quick else (200, 100_000, 80)
    blocks, steps = (1, 6) if options.quick else (2, 15)
    report = Report("dashboard")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        report.figures |= {"runs": runs, "rollouts": rollouts, "bar_s": BAR_S}
        if options.part != "cost":
            for number in range(runs):
                small_run(folder / "many", number)
            large_run(folder / "many" / "large", rollouts)
            pages(folder / "many", report, visits)
        if options.part != "pages":
            (folder / "live").mkdir()
            cost(folder / "live", report, blocks, steps)
    report.finish(options.json)


if __name__ == "__main__":
    main()
