"""How long islands wait beyond what their unequal pace makes them wait.

    python benchmarks/islands_waits.py [--quick] [--json FILE]

Four islands in threads train 18 steps of drawn lengths, 0.7 to 1.3 s, in rounds of 6 that overlap
one step, over a store in memory. Their pace alone makes them wait for the slowest: computed from
the lengths. The rest is lost by the program, such as the time until a closed round is found.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial

from islands_stores import MemoryStore
from islands_world import Run, island_config, together
from report import Report, arguments

from composer_mesh.plugins.islands.rounds.all_reduce import Clock

ISLANDS, STEPS, STEPS_PER_ROUND, OVERLAP = 4, 18, 6, 1
WORLDS, QUICK_WORLDS = 6, 2
Lengths = list[list[float]]


@dataclass
class Waits:
    """Seconds that all islands of one world have trained and waited, and would wait at least."""

    trained_s: float
    waited_s: float
    by_pace_s: float

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of all time: waited, and by the pace alone."""
        return (
            self.waited_s / (self.trained_s + self.waited_s),
            self.by_pace_s / (self.trained_s + self.by_pace_s),
        )


def world(seed: int) -> Waits:
    """Let islands train in real time; return what they have waited."""
    drawn, store = random.Random(seed), MemoryStore()
    lengths = [[drawn.uniform(0.7, 1.3) for _ in range(STEPS)] for _ in range(ISLANDS)]
    rounds = {"steps_per_round": STEPS_PER_ROUND, "overlap_steps": OVERLAP, "deadline_s": 600.0}
    configs = [island_config(rank, ISLANDS, **rounds) for rank in range(ISLANDS)]
    runs = [Run(rank, one, store, STEPS, clock=Clock()) for rank, one in enumerate(configs)]
    for run in runs:
        run.open()

    def live(run: Run) -> None:
        for length in lengths[run.rank]:
            time.sleep(length)
            run.train()

    together([partial(live, run) for run in runs])
    waited = sum(figures["time/islands_s"] for run in runs for figures in run.figures)
    return Waits(sum(map(sum, lengths)), waited, by_pace(lengths))


def by_pace(lengths: Lengths) -> float:
    """Return the seconds for which islands wait whose rounds take no time at all."""
    now, sent, waited = [0.0] * len(lengths), [0.0] * len(lengths), 0.0
    for step in range(1, STEPS + 1):
        now = [time_s + one[step - 1] for time_s, one in zip(now, lengths, strict=True)]
        if step % STEPS_PER_ROUND == 0:
            sent = list(now)
        if step == STEPS or (step > OVERLAP and (step - OVERLAP) % STEPS_PER_ROUND == 0):
            after = [max(time_s, *sent) for time_s in now]
            waited += sum(after) - sum(now)
            now = after
    return waited


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("islands_waits")
    seeds = range(QUICK_WORLDS if options.quick else WORLDS)
    worlds: dict[int, Waits] = {}

    def keep(seed: int) -> None:
        worlds[seed] = world(seed)

    together([partial(keep, seed) for seed in seeds])
    found = [worlds[seed] for seed in seeds]
    total = Waits(
        sum(one.trained_s for one in found),
        sum(one.waited_s for one in found),
        sum(one.by_pace_s for one in found),
    )
    rows = [tuple(f"{share:.2%}" for share in one.shares) for one in (*found, total)]
    names = [*(f"world {number}" for number in range(1, len(found) + 1)), "all"]
    report.print_table(
        "share of the time that islands wait",
        ("", "waited", "by their pace alone"),
        [(name, *row) for name, row in zip(names, rows, strict=True)],
    )
    report.figures |= {"waited": total.shares[0], "by_pace": total.shares[1]}
    report.ratios |= {"waited_over_pace": total.waited_s / total.by_pace_s}
    report.finish(options.json)


if __name__ == "__main__":
    main()
