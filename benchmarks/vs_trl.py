"""The complete mesh against TRL's GRPOTrainer: tokens trained per second, and time to 0.8 success.

    python benchmarks/vs_trl.py [--quick] [--json FILE]

Both train the quickstart's tiny Qwen3, from the same warm start, on the same episodes of the
toolbox task, several turns each, with the same rewards, loss, batch, optimizer and rates. TRL plays
them by its `rollout_func` and samples by its own generation; the mesh is `composer-mesh train` with
GRPO alone, with shared prefixes and without, and once more with all three channels. The sides
alternate, each at its best settings: TRL is tried with several numbers of threads and rows before.

A token counts where the policy sampled it and the loss saw it. Tokens per second leave out
start-up, the first two steps and the last two, in which the mesh samples no more. Time to success
is training time up to the first policy that solves 0.8 of the held-out episodes, greedily, by one
evaluator for all; and, because that takes only a few steps, up to the step whose sampled rollouts
do (mean of three steps). Policies are saved in separate runs, because a checkpoint of a run holds
more than TRL's folder of weights, and is written through to the disk. TRL comes from the extra
`bench`; without it, its ratios are reported as missing.
"""

import importlib.util
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from report import Report, arguments
from vs_trl_episodes import Player
from vs_trl_run import Recorded, record

from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.tasks.loading import make_task

HERE = Path(__file__).resolve().parent
PRESET = HERE.parent / "configs" / "quickstart.toml"
CORES = len(os.sched_getaffinity(0))
MARGIN = 2
"""Steps at both ends that tokens per second leave out."""
GOAL = 0.8
ALONE = ("sdpo.alpha=0.0", "replay.beta=0.0")
MESH = ("trainer.prefix_sharing=true", "schedule.max_lag=2")
"""The mesh's best settings: what the samples of a group begin with is computed once, and with a lag
of two nothing waits for the sequential turns of an episode."""
WITHOUT_SHARING = ("trainer.microbatch_tokens=1024", "schedule.max_lag=2")
"""The best ones that compute each sequence apart: the mesh sorts by length, so that short
microbatches have little padding."""
SIDES: Mapping[str, Sequence[str]] = {
    "trl": ALONE,
    "mesh": (*ALONE, *MESH),
    "mesh_without_sharing": (*ALONE, *WITHOUT_SHARING),
    "mesh_three_channels": MESH,
}
"""Overrides of the preset for each side."""


@dataclass(frozen=True)
class Way:
    """How TRL is run.

    With `spin` its threads busy-wait for each other, as they do by default: fastest alone on a
    machine, but slow next to other load.
    """

    threads: int
    rows: int
    """Sequences of one forward and backward."""
    spin: bool = False

    @property
    def env(self) -> dict[str, str]:
        found = {"OMP_NUM_THREADS": str(self.threads)}
        return found if self.spin else found | {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Size:
    """Size of the comparison: steps of each run, rounds, and evaluation of the policies."""

    steps: int
    rounds: int
    episodes: int
    """Held-out episodes played by saved policies; 0 saves none."""
    tries: Sequence[Way]
    """Ways to run TRL; the best one is used."""
    sides: Sequence[str] = tuple(SIDES)


FULL = Size(30, 2, 200, [Way(1, 48), Way(1, 16), *(Way(CORES, r, spin=True) for r in (16, 48))])
QUICK = Size(9, 1, 0, [Way(1, 48), Way(CORES, 48, spin=True)], ("trl", "mesh"))
TRIED_STEPS, TRIED_S = 3, 60.0
"""Steps of a trial, and the seconds after which it is aborted."""


@dataclass
class Side:
    """Results of one side, run by run."""

    runs: list[Recorded] = field(default_factory=list)
    saved: list[Recorded] = field(default_factory=list)
    """Repetitions of the runs with each step's policy saved, which takes time."""
    successes: list[dict[int, float]] = field(default_factory=list)
    """Held-out success of the policies of each saved run, by step."""

    def tokens_per_s(self, size: Size) -> list[float]:
        return [run.tokens_per_s(MARGIN, size.steps - MARGIN) for run in self.runs]

    def greedy(self) -> list[int | None]:
        """Return the step of each saved run whose policy first reached the goal."""
        firsts = [
            next((step for step, success in sorted(found.items()) if success >= GOAL), None)
            for found in self.successes
        ]
        return firsts or [None] * len(self.runs)

    def sampled(self) -> list[int | None]:
        """Return the step of each run whose own rollouts reached the goal."""
        return [run.sampled(GOAL) for run in self.runs]

    def time_to(self, steps: Sequence[int | None]) -> float | None:
        """Return the median training seconds up to these steps; None if a run missed it."""
        pairs = zip(self.runs, steps, strict=True)
        seconds = [None if step is None else run.trained_s(step) for run, step in pairs]
        known = [one for one in seconds if one is not None]
        return statistics.median(known) if len(known) == len(seconds) and known else None


GOALS: Mapping[str, Callable[[Side], list[int | None]]] = {
    "greedy": Side.greedy,
    "sampled": Side.sampled,
}


class Comparison:
    """The runs of one comparison, in their own folder."""

    def __init__(self, size: Size, folder: Path) -> None:
        self._size, self._folder, self._count = size, folder, 0
        self.policy = prepare_policy(self.config("mesh"), make_task(self.config("mesh")))
        self._best = size.tries[0]

    def config(self, side: str, steps: int | None = None, saves: bool = False) -> Config:
        """Return the config of a side's run."""
        settings = [
            f"run.steps={steps or self._size.steps}",
            f"trainer.checkpoint_every={int(saves)}",
            "eval.episodes=1",
        ]
        return load_config(PRESET, [*SIDES[side], *settings])

    def choose(self) -> Way:
        """Return the fastest of the ways to run TRL that are tried."""
        if len(self._size.tries) > 1:
            found = {way: self._tried(way) for way in self._size.tries}
            self._best = max(found, key=lambda way: found[way])
        return self._best

    def _tried(self, way: Way) -> float:
        run = self.run("trl", TRIED_STEPS, way)
        return run.tokens_per_s(1, TRIED_STEPS) if len(run.steps) == TRIED_STEPS else 0.0

    def run(
        self, side: str, steps: int | None = None, way: Way | None = None, saves: bool = False
    ) -> Recorded:
        """Do one run of a side, in its own process, to its end."""
        self._count += 1
        place = self._folder / f"{self._count}-{side}"
        output, keep, file = place / "run", place / "policies", place / "config.toml"
        keep.mkdir(parents=True)
        file.write_text(dump_toml(self.config(side, steps, saves)))
        if side != "trl":
            command = ["-m", "composer_mesh", "train", file, "--output", output]
            return record(_python(command), output, {}, keep)
        patience_s = None if way is None else TRIED_S
        way = way or self._best
        command = [HERE / "vs_trl_peer.py", file, self.policy, output]
        command += ["--save-every", int(saves), "--rows", way.rows]
        return record(_python(command), output, way.env, keep, patience_s)

    def successes(self, run: Recorded) -> dict[int, float]:
        """Return the greedy success of a run's saved policies, up to the goal, and of the last."""
        config = self.config("mesh")
        task, tokenizer = make_task(config), load_tokenizer(self.policy)
        player = Player(config, task, ChatFormat(tokenizer, task.tools))
        episodes = [task.episode("heldout", index) for index in range(self._size.episodes)]
        steps, found = sorted(run.policies), dict[int, float]()
        for step in steps:
            if step == steps[-1] or max(found.values(), default=0.0) < GOAL:
                greedy = Greedy(run.policies[step], config.generator.max_new_tokens, tokenizer)
                played = player.play(episodes, greedy)
                found[step] = statistics.mean(one.success for one in played)
        return found


class Greedy:
    """A policy's greedy answers, by transformers' own generation."""

    def __init__(self, folder: Path, longest: int, tokenizer: object) -> None:
        self._model, self._longest = load_model(folder), longest
        self._pad, self._stop = tokenizer.pad_token_id, tokenizer.eos_token_id  # type: ignore[attr-defined]

    @torch.no_grad()
    def __call__(self, contexts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, contexts))
        ids = torch.tensor([[self._pad] * (width - len(one)) + one for one in contexts])
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in contexts])
        found = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=self._longest,
            pad_token_id=self._pad,
            eos_token_id=self._stop,
        )
        return [self._until_stop(row) for row in found[:, width:].tolist()]

    def _until_stop(self, row: list[int]) -> list[int]:
        return row[: row.index(self._stop) + 1] if self._stop in row else row


def _python(command: Sequence[object]) -> list[str]:
    return [sys.executable, *map(str, command)]


def compare(size: Size, peer: bool) -> tuple[dict[str, Side], Way | None]:
    """Run every side in turn, for all rounds; return the sides and the way TRL was run."""
    sides = {name: Side() for name in size.sides if peer or name != "trl"}
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as folder:
        comparison = Comparison(size, Path(folder))
        best = comparison.choose() if peer else None
        for _ in range(size.rounds):
            for name, side in sides.items():
                side.runs.append(comparison.run(name))
        for name, side in sides.items():
            side.saved = [comparison.run(name, saves=True) for _ in side.runs if size.episodes]
            side.successes = [comparison.successes(run) for run in side.saved]
    return sides, best


def report_on(sides: Mapping[str, Side], best: Way | None, size: Size) -> Report:
    report, rows = Report("vs_trl"), []
    report.figures["cores"] = CORES
    if best is not None:
        report.figures |= {"trl_threads": best.threads, "trl_rows": best.rows}
    for name, side in sides.items():
        figures = figures_of(side, size)
        report.figures |= {f"{name}_{key}": round(value, 3) for key, value in figures.items()}
        shown = ("tokens_per_s", "s_to_greedy", "s_to_sampled", "trained_s", "wall_s")
        rows.append([name, *(f"{figures[key]:.1f}" if key in figures else "-" for key in shown)])
    columns = ["", "tokens/s", f"s to {GOAL}, greedy", "sampled", f"s of {size.steps} steps"]
    report.print_table(f"Trained on {CORES} cores", [*columns, "with start and end"], rows)
    return report


def figures_of(side: Side, size: Size) -> dict[str, float]:
    """Return medians over the runs of a side."""
    found = {
        "tokens_per_s": statistics.median(side.tokens_per_s(size)),
        "trained_s": statistics.median(run.trained_s(size.steps) for run in side.runs),
        "wall_s": statistics.median(run.wall_s for run in side.runs),
    }
    for name, steps_of in GOALS.items():
        steps = steps_of(side)
        known = [step for step in steps if step is not None]
        if (seconds := side.time_to(steps)) is not None:
            found |= {f"s_to_{name}": seconds, f"steps_to_{name}": statistics.median(known)}
    if side.successes and all(side.successes):
        found["success"] = statistics.median(one[max(one)] for one in side.successes)
    return found


def add_ratios(report: Report, sides: Mapping[str, Side], size: Size) -> None:
    """Add the ratios of mesh to TRL, and of sharing to none, for runs of the same round."""

    def faster(one: str, other: str) -> float:
        pairs = zip(sides[one].tokens_per_s(size), sides[other].tokens_per_s(size), strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    for name in sides.keys() - {"trl"}:
        key = "tokens_per_s_over_trl" if name == "mesh" else f"{name}_over_trl"
        report.ratios[key] = faster(name, "trl")
    if "mesh_without_sharing" in sides:
        report.ratios["sharing_over_without"] = faster("mesh", "mesh_without_sharing")
    for name, steps_of in GOALS.items():
        theirs, ours = (sides[s].time_to(steps_of(sides[s])) for s in ("trl", "mesh"))
        if theirs is not None and ours is not None:
            report.ratios[time_ratio(name)] = theirs / ours
        else:
            sides_late = [s for s, took in (("trl", theirs), ("mesh", ours)) if took is None]
            why = f"the goal was not reached by: {', '.join(sides_late)}"
            report.missing[time_ratio(name)] = why


def time_ratio(goal: str) -> str:
    """Return the name of the ratio of the times to a goal."""
    return f"trl_time_to_{goal}_goal_over_mesh"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    size = QUICK if options.quick else FULL
    torch.set_num_threads(1)
    peer = importlib.util.find_spec("trl") is not None
    sides, best = compare(size, peer)
    report = report_on(sides, best, size)
    if peer:
        add_ratios(report, sides, size)
    else:
        why = "TRL is not installed: pip install -e '.[bench]'"
        report.missing |= dict.fromkeys(("tokens_per_s_over_trl", *map(time_ratio, GOALS)), why)
    report.finish(options.json)


if __name__ == "__main__":
    main()
