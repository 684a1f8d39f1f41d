"""A real pretrained model learns to call functions: before, after SFT, after RL, and by TRL's GRPO.

    nox -s real-model
    python benchmarks/real_model_bfcl.py before
    python benchmarks/real_model_bfcl.py sft
    python benchmarks/real_model_bfcl.py teachers
    python benchmarks/real_model_bfcl.py rl --seed 0
    python benchmarks/real_model_bfcl.py trl
    python benchmarks/real_model_bfcl.py report --json FILE

Each stage is a sitting. It ends with an evaluation of all held-out rows, greedily and with four
samples of each, and writes docs/real-model/STAGE.json; `teachers` ends without, and `rl` serves
them while it trains. A stage that was interrupted continues. Minutes are those of the steps, and
the peak of memory is that of the last sitting. `report` compares the rows of the stages: the gain
is a mean of differences by row, and its interval is a bootstrap over rows. Its ratio is the time of
the first five steps over TRL's. It draws docs/real-model/curves.png.
"""

import json
import math
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import Report, arguments
from serve import serving

from composer_mesh.configs.load import dump_toml, load_config
from composer_mesh.services.run.tracking import deaths_of
from composer_mesh.services.store.reading import RunReader

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CONFIG = ROOT / "configs" / "smollm2-bfcl.toml"
RESULTS = ROOT / "docs" / "real-model"
TEACHER = ROOT / "configs" / "smollm2-bfcl-teacher.toml"
SFT = Path("runs/smollm2-bfcl-sft")
MESH = (sys.executable, "-m", "composer_mesh")
STAGES = ("before", "sft", "teachers", "rl", "trl", "report")
TEACHERS = {8101: 1, 8102: 2}
"""Seed of the teacher at each port of the config."""
SAMPLES = 4
DRAWS = 10_000
"""Bootstrap samples of rows."""
TRL_ROWS = 8
"""Sequences that share a forward and backward of TRL."""
KINDS = ("greedy", "sampled")
SHOWN = (
    *("reward/mean", "loss/sft", "loss/policy", "loss/sdpo", "loss/replay", "replay/pairs"),
    *("rollouts/count", "rollouts/flat_groups", "tokens/trained", "time/step_s"),
    *("sdpo/advantage_over_student", "policy/grad_norm", "rollouts/entropy"),
)
"""Metrics of the curves."""

Rows = dict[str, list[bool]]
"""Success of each sample of a row, by the number of its held-out episode."""


class Peak:
    """Largest memory of this process's children together, in GB: proportional shares of pages."""

    def __init__(self) -> None:
        self.gb = 0.0
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._ended.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(10.0):
            self.gb = max(self.gb, sum(map(_gb, psutil.Process().children(recursive=True))))


def _gb(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss) / 1e9
    except psutil.Error:  # it has ended
        return 0.0


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("stage", choices=STAGES, nargs="?", default="report")
    parser.add_argument("--seed", type=int, default=0, help="of the RL run")
    parser.add_argument("--episodes", type=int, default=125, help="held-out rows of an evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=V")
    given = parser.parse_args()
    if given.stage == "report":
        return report(given.json)
    if given.stage == "teachers":
        return teachers(given.set)
    RESULTS.mkdir(exist_ok=True)
    name = f"{given.stage}-{given.seed}" if given.stage == "rl" else given.stage
    peak = Peak()
    with peak.watching():
        figures, folder = TRAINED[given.stage](given.set, given.seed)
    figures |= {"minutes": sum(figures.get("time/step_s", ())) / 60, "peak_gb": peak.gb or None}
    result = Report("real_model_bfcl")
    result.figures = {**figures, **evaluated(name, folder, given.set, given.episodes)}
    result.finish(RESULTS / f"{name}.json")
    return None


def before(sets: Sequence[str], _seed: int) -> tuple[dict[str, Any], Path]:
    """Nothing is trained."""
    folder = load_config(CONFIG, sets).policy.folder
    if folder is None:
        raise SystemExit(f"{CONFIG} has no policy.path: restore it, or set it by --set")
    return {}, folder


def sft(sets: Sequence[str], _seed: int) -> tuple[dict[str, Any], Path]:
    """Fine-tune on the task's demonstrations."""
    return _trained("sft", sets, SFT)


def teachers(sets: Sequence[str]) -> None:
    """Fine-tune the teachers of the replay channel, one after another."""
    for seed in TEACHERS.values():
        given = _overrides([*sets, f"run.seed={seed}"])
        _call([*MESH, "sft", TEACHER, "--output", _teacher(seed), "--auto-resume", *given])


def rl(sets: Sequence[str], seed: int) -> tuple[dict[str, Any], Path]:
    """Train with all channels from the supervised checkpoint, with the teachers served."""
    with ExitStack() as served:
        for port, teacher in TEACHERS.items():
            served.enter_context(_served(port, teacher))
        return _trained("train", [*sets, f"run.seed={seed}"], Path(f"runs/smollm2-bfcl-{seed}"))


def _teacher(seed: int) -> Path:
    return Path(f"runs/smollm2-bfcl-teacher-{seed}")


def _served(port: int, seed: int) -> AbstractContextManager[str]:
    """Serve a teacher by OpenAI's API for a block."""
    teacher = _teacher(seed)
    if not teacher.is_dir():
        raise SystemExit(f"{teacher} is no run: run `real_model_bfcl.py teachers` first")
    output = Path(f"{teacher}-serve")
    sets = _overrides([f"policy.start=sft:{teacher}", "trainer.compute_dtype=float32"])
    words = ["--port", str(port), "--output", str(output), *sets]
    return serving([*MESH, "serve", str(TEACHER), *words], port, output.with_suffix(".log"))


def trl(sets: Sequence[str], seed: int) -> tuple[dict[str, Any], Path]:
    """Train by TRL's GRPOTrainer from the same checkpoint, on the same rows, at the same rates."""
    start, output = _newest(SFT), Path("runs/smollm2-bfcl-trl")
    alone = [
        f"policy.path={start}",
        "policy.start=base",
        "sdpo.alpha=0.0",
        "replay.beta=0.0",
        f"run.seed={seed}",
    ]
    config = load_config(CONFIG, [*sets, *alone])
    if (output / "checkpoints" / f"step-{config.run.steps}").is_dir():
        return _curve(output), _newest(output)
    output.mkdir(parents=True, exist_ok=True)
    file = output / "config.toml"
    file.write_text(dump_toml(config.model_copy(update={"sft": None})))
    peer = [sys.executable, HERE / "vs_trl_peer.py", file, start, output]
    _call([*peer, "--save-every", config.trainer.checkpoint_every, "--rows", TRL_ROWS])
    return _curve(output), _newest(output)


TRAINED = {"before": before, "sft": sft, "rl": rl, "trl": trl}


def _trained(command: str, sets: Sequence[str], output: Path) -> tuple[dict[str, Any], Path]:
    _call([*MESH, command, CONFIG, "--output", output, "--auto-resume", *_overrides(sets)])
    return _curve(output), _newest(output)


def _call(command: Sequence[object]) -> None:
    subprocess.run([str(part) for part in command], check=True)


def _overrides(sets: Sequence[str]) -> list[str]:
    return [part for one in sets for part in ("--set", one)]


def _newest(run: Path) -> Path:
    """Return the model folder of a run's last checkpoint."""
    found = max((run / "checkpoints").glob("step-*"), key=lambda one: int(one.name[5:]))
    return found / "policy" if (found / "policy").is_dir() else found


def _curve(run: Path) -> dict[str, Any]:
    """Return the metrics of each step that the curves show, and the deaths of processes."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return {key: [step.get(key) for step in steps] for key in SHOWN} | {"deaths": deaths_of(run)}


def evaluated(stage: str, folder: Path, sets: Sequence[str], episodes: int) -> dict[str, Any]:
    """Evaluate a model folder greedily and sampled; return the success of each sample by row."""
    found = dict[str, Any]()
    for name, temperature, samples in (("greedy", 0.0, 1), ("sampled", 1.0, SAMPLES)):
        output = Path(f"runs/smollm2-bfcl-eval-{stage}-{name}")
        own = [f"policy.path={folder}", "policy.start=base", f"eval.episodes={episodes}"]
        own += [f"eval.temperature={temperature}"]
        command = [*MESH, "eval", CONFIG, "--samples", samples, "--output", output]
        resumed = ["--resume"] if output.exists() else []
        _call([*command, *resumed, *_overrides([*sets, *own])])
        rows: Rows = {}
        with RunReader(output) as reader:
            for row in reader.rows():
                rows.setdefault(str(row.index), []).append(row.success)
        found |= {f"{name}_rows": rows, f"{name}_success": _mean(rows)}
    return found


def _mean(rows: Rows) -> float:
    return statistics.mean(statistics.mean(one) for one in rows.values())


def gain(after: Rows, before_it: Rows) -> tuple[float, float, float]:
    """Return the mean difference by row, and the bounds of its 95 % bootstrap interval."""
    if after.keys() != before_it.keys():
        raise SystemExit("two stages have evaluated other rows: run both with the same --episodes")
    differences = [statistics.mean(after[row]) - statistics.mean(before_it[row]) for row in after]
    rng = random.Random(0)
    means = sorted(
        statistics.mean(rng.choices(differences, k=len(differences))) for _ in range(DRAWS)
    )
    bounds = means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS)]
    return statistics.mean(differences), *bounds


def report(file: Path | None) -> None:
    """Print the stages side by side, and the gain of each over the supervised checkpoint."""
    found = {path.stem: json.loads(path.read_text())["figures"] for path in RESULTS.glob("*.json")}
    result = Report("real_model_bfcl")
    table = []
    for name in sorted(found, key=_order):
        one = found[name]
        shown = [f"{100 * one[f'{kind}_success']:.1f}" for kind in KINDS]
        cells = [name, *shown]
        for kind in KINDS:
            if "sft" not in found or name in ("before", "sft"):
                cells.append("")
                continue
            mean, low, high = gain(one[f"{kind}_rows"], found["sft"][f"{kind}_rows"])
            cells.append(f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})")
            result.figures[f"{name}/{kind}_gain"] = mean
        peak = "not measured" if one["peak_gb"] is None else f"{one['peak_gb']:.1f}"
        table.append([*cells, f"{one['minutes']:.0f}", peak])
    columns = ("stage", "greedy %", "sampled %", "greedy over SFT", "sampled over SFT")
    result.print_table("held-out rows", (*columns, "minutes", "peak GB"), table)
    draw({name: found[name] for name in sorted(found, key=_order)}, RESULTS / "curves.png")
    runs = [one for name, one in found.items() if name.startswith("rl-")]
    if runs and "trl" in found:
        ours, theirs = statistics.mean(map(_first_steps_s, runs)), _first_steps_s(found["trl"])
        result.ratios["first_steps_over_trl"] = ours / theirs
    else:
        result.missing["first_steps_over_trl"] = f"{RESULTS} has no results of both rl and trl"
    result.finish(file)


def _first_steps_s(stage: dict[str, Any]) -> float:
    """Return the seconds of the first steps, in which two trainings still have the same policy."""
    return math.fsum(stage["time/step_s"][:5])


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw the rewards of the steps, and the held-out success of the stages with its interval."""
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    rewards, success = figure.subplots(1, 2)
    _draw_rewards(rewards, found)
    _draw_success(success, found)
    figure.savefig(file)


def _draw_rewards(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        values = one.get("reward/mean", ())
        if any(value is not None for value in values):
            shown = [statistics.mean(values[max(0, at - 2) : at + 3]) for at in range(len(values))]
            (line,) = axes.plot(range(1, len(values) + 1), shown, label=name)
            for step, label in one.get("deaths", ()):
                _mark_death(axes, step, shown[min(step, len(shown)) - 1], label, line.get_color())
    axes.set(xlabel="optimizer step", ylabel="reward of training rows, mean of 5 steps")
    if axes.lines:
        axes.legend(frameon=False)


def _mark_death(axes: Axes, step: int, height: float, label: str, colour: Any) -> None:
    axes.plot([step], [height], "X", color=colour, markersize=11, markeredgecolor="white")
    axes.annotate(
        f"{label},\nresumed",
        (step, height),
        xytext=(12, 8),
        textcoords="offset points",
        color=colour,
        parse_math=False,
        arrowprops={"arrowstyle": "-", "color": colour},
    )


def _draw_success(axes: Axes, found: dict[str, dict[str, Any]]) -> None:
    for shift, kind in zip((-0.1, 0.1), KINDS, strict=True):
        means, below, above = [], [], []
        for one in found.values():
            rows: Rows = one[f"{kind}_rows"]
            mean, low, high = gain(rows, {row: [False] for row in rows})
            means.append(100 * mean)
            below.append(100 * (mean - low))
            above.append(100 * (high - mean))
        places = [at + shift for at in range(len(found))]
        axes.errorbar(places, means, yerr=(below, above), fmt="o", capsize=3, label=kind)
    axes.set_xticks(range(len(found)), list(found))
    axes.set(ylabel="held-out rows, % right", ylim=(-2, 100))
    axes.legend(frameon=False)


def _order(name: str) -> tuple[int, str]:
    return STAGES.index(name.partition("-")[0]), name


if __name__ == "__main__":
    main()
