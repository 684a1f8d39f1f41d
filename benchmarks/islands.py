"""Islands: what they send, how long they wait, what faults do to them, and what they learn.

    python benchmarks/islands.py [--quick] [--runs] [--islands N] [--json FILE]

`worlds` are three islands in threads over a store that fails (benchmarks/islands_faults.py);
`kills` are processes over a folder and over an S3 server, killed by SIGKILL. Every average is
computed once more by other code (`wrong_averages`). With --runs the quickstart is trained by one
run, and by N islands that have as many rollouts together; `communicated_bytes_over_ddp` is what an
island sends and receives in a step, over that of a rank in a ring all-reduce of float32 gradients.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from islands_faults import faulty_world
from islands_kills import KillOutcome, killed_islands
from islands_s3 import BUCKET, s3_program, s3_server
from report import Report, arguments

from composer_mesh.plugins.islands.store.blobs import decided
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.services.directory.report import read_metrics

PRESET = Path(__file__).parents[1] / "configs" / "quickstart.toml"
WORLDS, QUICK_WORLDS = 40, 8
KILLS, QUICK_KILLS = 20, 3
STEPS_PER_ROUND = 6
ISLANDS_LR = 8e-4
"""More than the preset's 3e-4: an island takes a quarter of the steps, and four are averaged."""
OUTER = {"islands.outer.lr": 1.0, "islands.outer.momentum": 0.0}
"""Plain averages: DiLoCo's momentum needs more rounds than the three of this short run."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--runs", action="store_true", help="train the quickstart too: minutes")
    parser.add_argument("--islands", type=int, default=4, metavar="N", help="in --runs; 4")
    parser.add_argument("--s3", action="store_true", help="let the runs meet in the S3 server")
    parser.add_argument("--overlap", type=int, default=1, metavar="STEPS", help="in --runs; 1")
    options = parser.parse_args()
    report = Report("islands")
    with TemporaryDirectory(prefix="islands-") as folder:
        worlds(report, QUICK_WORLDS if options.quick else WORLDS)
        kills(report, Path(folder), QUICK_KILLS if options.quick else KILLS)
        if options.runs:
            runs(report, Path(folder), options.islands, options.s3, options.overlap)
    report.finish(options.json)


def worlds(report: Report, count: int) -> None:
    """Live worlds with faults of the store, kills, slow islands, wrong clocks and NaN."""
    found = [faulty_world(seed) for seed in range(count)]
    happened, new_events = Counter[str](), Counter[str]()
    for one in found:
        happened += one.happened
        new_events += one.new_events
        for text in one.wrong:
            print(f"world {one.seed}: {text}")
    total = {
        "worlds": len(found),
        "worlds_kills": sum(one.kills for one in found),
        "worlds_rounds": sum(one.rounds for one in found),
        "worlds_rounds_lost": sum(one.lost for one in found),
        "worlds_hangs": sum(one.hangs for one in found),
        **{f"worlds_{name}": number for name, number in sorted((happened + new_events).items())},
    }
    report.figures |= total
    report.ratios["wrong_averages"] = sum(len(one.wrong) for one in found)
    report.ratios["hangs"] = total["worlds_hangs"]
    report.ratios["rounds_lost"] = total["worlds_rounds_lost"]
    rows = [(name.removeprefix("worlds_"), str(number)) for name, number in total.items()]
    report.print_table("three islands over a failing store", ("what", "number"), rows)


def kills(report: Report, folder: Path, count: int) -> None:
    """Kill processes over a folder, and over an S3 server where one is installed."""
    found = {"file": killed_islands(f"file://{folder}/store", folder / "file", kills=count, seed=1)}
    program = s3_program()
    if program is None:
        print("no S3 server is installed, so none was used: make s3")
    else:
        with s3_server(program, folder / "s3.log") as environment:
            os.environ |= environment
            found["s3"] = killed_islands(f"s3://{BUCKET}/kills", folder / "s3", kills=count, seed=2)
    for name, one in found.items():
        for text in one.wrong:
            print(f"{name}: {text}")
        report.figures |= {f"{name}_kills": one.kills, f"{name}_rounds": one.rounds}
        report.ratios["wrong_averages"] += len(one.wrong) + one.steps_missing
        report.ratios["hangs"] += one.hangs
        report.ratios["rounds_lost"] += one.lost
    report.print_table(
        "processes killed by SIGKILL",
        ("store", "kills", "rounds", "lost", "hangs", "wrong"),
        [(name, *_numbers(one)) for name, one in found.items()],
    )


def _numbers(one: KillOutcome) -> tuple[str, ...]:
    numbers = (one.kills, one.rounds, one.lost, one.hangs, len(one.wrong) + one.steps_missing)
    return tuple(map(str, numbers))


def runs(report: Report, folder: Path, count: int, by_s3: bool, overlap: int) -> None:
    """Train the quickstart in one run, and in islands with as many rollouts together."""
    steps = 72 // count
    alone = folder / "alone"
    _run(
        folder, "train", str(PRESET), "--set", f"run.steps={72 // count * count}", "--output", alone
    )
    program = s3_program() if by_s3 else None
    with ExitStack() as servers:
        if program is not None:
            os.environ |= servers.enter_context(s3_server(program, folder / "runs.log"))
        uri = f"s3://{BUCKET}/runs" if by_s3 else f"file://{folder}/meet"
        settings = {
            "run.steps": steps,
            "trainer.lr": ISLANDS_LR,
            "islands.steps_per_round": STEPS_PER_ROUND,
            "islands.quantization": "int8",
            "islands.overlap_steps": overlap,
            **OUTER,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        all_of = folder / "islands"
        _run(
            folder,
            "islands",
            str(PRESET),
            *words,
            "-n",
            str(count),
            "--store",
            uri,
            "--output",
            all_of,
        )
        _compare(report, alone, all_of, uri, count)


def _run(folder: Path, *words: str | Path) -> None:
    log = folder / "run.log"
    command = [sys.executable, "-m", "composer_mesh", *map(str, words)]
    with log.open("ab") as out:
        done = subprocess.run(command, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]} failed:\n{log.read_text()[-3000:]}")


def _compare(report: Report, alone: Path, all_of: Path, uri: str, count: int) -> None:
    one = json.loads((alone / "summary.json").read_text())
    many = json.loads((all_of / "summary.json").read_text())
    layout = decided(open_store(uri), "fragment-0000/states/00000000/outer") or {}
    parameters = int(layout["about"]["size"])
    bytes_of = [_bytes_after_start(all_of / f"island-{rank}") for rank in range(count)]
    ring = 2 * 2 * (count - 1) / count * 4 * parameters
    per_step = sum(bytes_of) / count / (many["each"][0]["steps"] - 1)
    report.figures |= {
        "islands": count,
        "store": uri.partition(":")[0],
        "parameters": parameters,
        "steps_per_round": STEPS_PER_ROUND,
        "islands_lr": ISLANDS_LR,
        "rounds": many["round"],
        "runs_rounds_lost": many["lost"],
        "success_alone": one["eval"]["final"]["success"],
        "success_islands": many["eval"]["final"]["success"],
        "success_before": one["eval"]["initial"]["success"],
        "rollouts_alone": one["rollouts"],
        "rollouts_islands": many["rollouts"],
        "wall_s_alone": one["wall_s"],
        "wall_s_islands": many["wall_s"],
        "bytes_start": many["bytes_sent"] + many["bytes_received"] - sum(bytes_of),
    }
    report.ratios |= {
        "communicated_bytes_over_ddp": per_step / ring,
        "bytes_over_ddp_times_steps_per_round": per_step / ring * STEPS_PER_ROUND,
        "time_communicating": many["time_communicating"],
        **_waits([all_of / f"island-{rank}" for rank in range(count)]),
        "success_islands_minus_alone": many["eval"]["final"]["success"]
        - one["eval"]["final"]["success"],
    }
    rows = [(name, str(value)) for name, value in report.figures.items() if "worlds" not in name]
    report.print_table("the quickstart", ("what", "number"), rows)


def _waits(runs: Sequence[Path]) -> dict[str, float]:
    """Return the parts of `time_communicating`: the first round, the last one, and the others.

    Islands begin at different times, for which the first round waits; the last is of all steps, so
    that there is none left to train while it is under way.
    """
    steps = [read_metrics(run / "metrics.jsonl") for run in runs]
    trained = sum(one["time/step_s"] for run in steps for one in run)
    parts = dict.fromkeys(("first", "other", "last"), 0.0)
    for run in steps:
        for one in run:
            first = one["islands/round"] <= 1
            part = "last" if one is run[-1] else "first" if first else "other"
            parts[part] += one.get("time/islands_s") or 0.0
    return {f"time_waiting_{part}": waited / trained for part, waited in parts.items()}


def _bytes_after_start(run: Path) -> int:
    """Return the bytes of the rounds: what an island sends and reads at its start is apart."""
    steps: list[dict[str, Any]] = read_metrics(run / "metrics.jsonl")[1:]
    return int(sum(one["islands/bytes_sent"] + one["islands/bytes_received"] for one in steps))


if __name__ == "__main__":
    main()
