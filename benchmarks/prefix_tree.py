"""A training step that computes shared prefixes once, against the dense one: time, memory, tokens.

    python benchmarks/prefix_tree.py [--quick | --long] [--json FILE] [--device cuda]

Each measurement is a whole step of all three channels in a process of its own: eight rollouts of a
prompt, error sites with hints before half of them, and pairs that begin with the prompt. Both ways
take the group as one microbatch; they alternate. Models have random weights. `--long` measures a
prompt of 32,768 tokens, with a smaller model.
"""

import multiprocessing
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Report, arguments

from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.step_plan import plan_step

MIB = 1 << 20
ROLLOUTS = 8
HINT = 24
OWN_PROMPT = 8
WAYS = ("dense", "shared")


@dataclass(frozen=True)
class Case:
    """A group: ids that all rollouts share, and those that each has alone."""

    name: str
    shared: int
    own: int
    hidden: int = 128
    layers: int = 4
    device: str = "cpu"

    @property
    def longest(self) -> int:
        return self.shared + OWN_PROMPT + self.own + HINT

    @property
    def budget(self) -> int:
        """Tokens of a microbatch that holds all rollouts and pairs, each of full length."""
        return 2 * ROLLOUTS * self.longest


@dataclass(frozen=True)
class Measured:
    """One step: its seconds and those of its plan, peak memory beyond the model, and tokens."""

    seconds: float
    planning_s: float
    extra_bytes: float
    tokens: dict[str, float]


def config_of(case: Case, way: str) -> Config:
    teachers = [{"name": name, "kind": "builtin"} for name in ("a", "b")]
    return Config.model_validate(
        {
            "run": {"name": "prefix-tree", "steps": 10},
            "data": {"task": "toolbox"},
            "policy": {"max_context": case.longest},
            "sdpo": {"alpha": 0.1, "placement": "inline", "teacher": "frozen"},
            "replay": {"beta": 0.1, "ask": 2, "teachers": teachers},
            "trainer": {
                "microbatch_tokens": case.budget,
                "prefix_sharing": way == "shared",
                "sharding": "none",
            },
        }
    )


def model_of(case: Case) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=4096,
        hidden_size=case.hidden,
        intermediate_size=3 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=case.hidden // 4,
        max_position_embeddings=case.longest + 1,
    )
    return AutoModelForCausalLM.from_config(shape).to(case.device)


def batch_of(case: Case) -> StepBatch:
    """Return eight rollouts, hinted views of four of them, and pairs that reject these four."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(4096) for _ in range(count)]

    shared = ids(case.shared)
    prompts = [shared + ids(OWN_PROMPT) for _ in range(ROLLOUTS)]
    answers = [ids(case.own) for _ in range(ROLLOUTS)]
    samples = [
        PolicySample(
            str(number),
            prompt + answer,
            [False] * len(prompt) + [True] * len(answer),
            [0.0] * len(prompt) + [-8.0] * len(answer),
            rng.choice([-1.0, 1.0]),
            [-1] * len(prompt) + [0] * len(answer),
        )
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    views, pairs = [], []
    for number in range(ROLLOUTS // 2):
        prompt, answer = prompts[number], answers[number]
        views.append(view_of(str(number), prompt, answer, ids(HINT)))
        if not case.shared:  # a pair of an earlier step
            prompt, answer = ids(OWN_PROMPT), ids(case.own)
        pairs.append(PairSample(str(number), prompt, ids(case.own), answer, (-20.0, -10.0)))
    return StepBatch(0, samples, views, pairs)


def view_of(trace: str, prompt: list[int], answer: list[int], hint: list[int]) -> HintedView:
    rows = [len(prompt) - 1 + place for place in range(len(answer))]
    hinted = [row + len(hint) for row in rows]
    return HintedView(trace, 0, prompt + hint + answer, rows, hinted, answer)


def measured(case: Case, way: str) -> Measured:
    """Run one step in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measured, (case, way))


def _measured(case: Case, way: str) -> Measured:
    torch.set_num_threads(1)
    config, model = config_of(case, way), model_of(case)
    step = ThreeChannelStep(model, None, config)
    teacher = TeacherModel(
        model,
        config.sdpo,
        case.budget,
        follows=True,
        sharing="levels" if way == "shared" else "off",
    )
    batch = batch_of(case)
    before = _reset_peak(case.device)
    began = time.perf_counter()
    metrics = step.run(batch, InlineSource(teacher, config.sdpo, 0))
    if case.device != "cpu":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    extra = _peak(case.device) - before
    tokens = {name: value for name, value in metrics.items() if name.startswith("tokens/")}
    began = time.perf_counter()
    plan_step(batch, case.budget, sharing="levels" if way == "shared" else "off")
    planning = time.perf_counter() - began
    return Measured(
        took, planning, extra, {name: float(value or 0) for name, value in tokens.items()}
    )


def _reset_peak(device: str) -> int:
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak(device)


def _peak(device: str) -> int:
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def compare(report: Report, case: Case, repeats: int) -> dict[str, float]:
    """Measure both ways in turn; return the ratios of shared to dense."""
    runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            runs[way].append(measured(case, way))
    took = {way: statistics.median(one.seconds for one in runs[way]) for way in WAYS}
    extra = {way: statistics.median(one.extra_bytes for one in runs[way]) for way in WAYS}
    tokens = runs["shared"][0].tokens
    ratios = {
        "time_over_dense": took["shared"] / took["dense"],
        "memory_over_dense": extra["shared"] / extra["dense"],
        "computed_over_unique": tokens["tokens/computed"] / tokens["tokens/unique"],
        "planning_over_step": statistics.median(
            one.planning_s / one.seconds for one in runs["shared"]
        ),
    }
    rows = [[way, f"{took[way]:.2f} s", f"{extra[way] / MIB:,.0f} MiB"] for way in WAYS]
    rows.append(["  shared / dense", *(f"{ratios[key]:.3f}" for key in list(ratios)[:2])])
    report.print_table(case.name, ["step", "forward, backward, update", "peak memory"], rows)
    for way in WAYS:
        report.figures[f"{case.name}: {way}_s"] = round(took[way], 3)
        report.figures[f"{case.name}: {way}_mib"] = round(extra[way] / MIB, 1)
    for name, value in tokens.items():
        report.figures[f"{case.name}: {name}"] = value
    for name, value in ratios.items():
        report.figures[f"{case.name}: {name}"] = round(value, 4)
    return ratios


def cases(quick: bool, long: bool, device: str) -> dict[str, Case]:
    """The groups; the ratios are those of `prompt`, and of `nothing` where nothing is shared."""
    if long:
        return {"prompt": Case("prompt of 32,768", 32_768, 256, hidden=64, layers=2, device=device)}
    size = 1024 if quick else 8192
    found = {"prompt": Case(f"prompt of {size:,}", size, 256, device=device)}
    if not quick:
        found["short"] = Case("prompt of 2,048", 2048, 256, device=device)
        found["late"] = Case("turns that branch after 6,144 of 8,192", 6144, 2048, device=device)
    found["nothing"] = Case("nothing shared", 0, 512 if quick else 2048, device=device)
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--long", action="store_true", help="a prompt of 32,768 tokens alone")
    options = parser.parse_args()
    report = Report("prefix_tree")
    for name, case in cases(options.quick, options.long, options.device).items():
        ratios = compare(report, case, 3 if name == "nothing" else 1 + options.quick)
        if name == "prompt":
            report.ratios.update(ratios)
        if name == "nothing":
            report.ratios["time_over_dense_unshared"] = ratios["time_over_dense"]
    if options.quick:
        report.figures["note"] = "a prompt of 1,024 shares less: its own bars are 0.5 and 0.6"
    report.finish(options.json)


if __name__ == "__main__":
    main()
