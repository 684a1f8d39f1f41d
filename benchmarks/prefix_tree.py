"""A training step that computes shared prefixes once, against the dense one: time, memory, tokens.

    python benchmarks/prefix_tree.py [--quick | --long] [--json FILE] [--only NAME...]

Each measurement is a whole step of all three channels in a process of its own: eight rollouts of a
prompt, error sites with hints before half of them, and pairs that begin with the prompt. Both ways
take the group as one microbatch; they alternate. Models have random weights. `--long` measures a
prompt of 32,768 tokens, with a smaller model. `teacher` measures what an SDPO teacher computes of
eight rollouts with four error sites each.
"""

import random
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from measuring import (
    MIB,
    in_a_process,
    in_turns,
    peak_bytes,
    policy_step,
    random_qwen3,
    reset_peak,
)
from report import Report, arguments

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel, hinted_states
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.prefix_tree import PrefixTree, unique_ids
from composer_mesh.rollouts.step_plan import plan_step

ROLLOUTS = 8
HINT = 24
OWN_PROMPT = 8
PLANS = [
    (16, 2048, 1024, 16_384, 1),
    (16, 6000, 2000, 10_000, 1),
    (64, 1024, 512, 16_384, 8),
    (4, 8192, 512, 32_768, 8),
]
"""Groups of a step, tokens of a prompt and at most of an answer, of a microbatch; ranks."""
SITES = 4
VOCABULARY = 4096
WAYS = ("dense", "shared")


@dataclass(frozen=True)
class Case:
    """A group: ids that all rollouts share, and those that each has alone."""

    name: str
    shared: int
    own: int
    hidden: int = 128
    layers: int = 4

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
                "attention": "sdpa",
                "sharding": "none",
            },
        }
    )


def model_of(case: Case) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": case.hidden,
        "intermediate_size": 3 * case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": case.hidden // 4,
        "max_position_embeddings": case.longest + 1,
    }
    return random_qwen3(sizes)


def batch_of(case: Case) -> StepBatch:
    """Return eight rollouts, hinted views of four of them, and pairs that reject these four."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    shared = ids(case.shared)
    prompts = [shared + ids(OWN_PROMPT) for _ in range(ROLLOUTS)]
    answers = [ids(case.own) for _ in range(ROLLOUTS)]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = policy_step(sequences, case.own)
    views, pairs = [], []
    for number in range(ROLLOUTS // 2):
        prompt, answer = prompts[number], answers[number]
        views.append(view_of(str(number), prompt, answer, ids(HINT)))
        if not case.shared:  # a pair of an earlier step
            prompt, answer = ids(OWN_PROMPT), ids(case.own)
        pairs.append(PairSample(str(number), prompt, ids(case.own), answer, (-20.0, -10.0)))
    return replace(batch, views=views, pairs=pairs)


def view_of(trace: str, prompt: list[int], answer: list[int], hint: list[int]) -> HintedView:
    rows = [len(prompt) - 1 + place for place in range(len(answer))]
    hinted = [row + len(hint) for row in rows]
    return HintedView(trace, 0, prompt + hint + answer, rows, hinted, answer)


def _measured(case: Case, way: str) -> Measured:
    torch.set_num_threads(1)
    config, model = config_of(case, way), model_of(case)
    step, sharing = OptimizerStep(model, None, config), config.trainer.sharing
    teacher = TeacherModel(model, config.sdpo, case.budget, follows=True, sharing=sharing)
    batch = batch_of(case)
    before = reset_peak()
    began = time.perf_counter()
    metrics = step.run(batch, InlineSource(teacher, config.sdpo, 0))
    took = time.perf_counter() - began
    extra = peak_bytes() - before
    tokens = {name: value for name, value in metrics.items() if name.startswith("tokens/")}
    began = time.perf_counter()
    plan_step(batch, case.budget, sharing=sharing)
    planning = time.perf_counter() - began
    return Measured(
        took, planning, extra, {name: float(value or 0) for name, value in tokens.items()}
    )


def teacher_views(case: Case) -> list[HintedView]:
    """Return hinted views of rollouts with several error sites, `own` tokens apart."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    shared, views = ids(case.shared), []
    for number in range(ROLLOUTS):
        context = shared + ids(OWN_PROMPT)
        for site in range(SITES):
            turn = ids(case.own)
            view = view_of(str(number), context, turn, ids(HINT))
            views.append(replace(view, turn=site))
            context = context + turn
    return views


def compare_teacher(report: Report, case: Case) -> float:
    """Measure a teacher's forwards both ways, in turns; return the ratio of their times."""
    torch.set_num_threads(1)
    model, views = model_of(case).eval(), teacher_views(case)
    contexts = [view.teacher_ids for view in views]
    sharing: dict[str, Sharing] = {"dense": "off", "shared": "levels"}

    def forwards(way: str) -> None:
        float(hinted_states(model, views, case.budget, sharing=sharing[way]).sum())

    took = in_turns({way: partial(forwards, way) for way in WAYS}, 3)
    dense, shared = (statistics.median(took[way]) for way in WAYS)
    unique = unique_ids(contexts)
    rows = [
        ["dense", f"{dense:.2f} s", f"{sum(map(len, contexts)):,}"],
        ["shared", f"{shared:.2f} s", f"{unique:,} unique"],
        ["  shared / dense", f"{shared / dense:.3f}", ""],
    ]
    report.print_table(case.name, ["teacher", "forwards", "tokens"], rows)
    report.figures[f"{case.name}: dense_s"] = round(dense, 3)
    report.figures[f"{case.name}: shared_s"] = round(shared, 3)
    return shared / dense


def compare_plans(report: Report) -> None:
    """Say what plans compute of the unique tokens, and the busiest rank's part of an even share."""
    rows = []
    for groups, prompt, longest, budget, ranks in PLANS:
        rng = random.Random(0)
        samples: list[PolicySample] = []
        for _ in range(groups):
            shared = [rng.randrange(VOCABULARY) for _ in range(prompt)]
            for _ in range(ROLLOUTS):
                own = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, longest))]
                samples.append(PolicySample(str(len(samples)), shared + own, [], [], 1.0, []))
        began = time.perf_counter()
        plans = plan_step(StepBatch(0, samples, [], []), budget, ranks, sharing="levels")
        took = time.perf_counter() - began
        unique = unique_ids([sample.ids for sample in samples])
        loads = [
            sum(
                PrefixTree.planned([samples[n].ids for n in one.samples], "levels").computed
                for one in plan.microbatches
            )
            for plan in plans
        ]
        computed, busiest = sum(loads) / unique, max(loads) * ranks / sum(loads)
        name = (
            f"{groups} groups, prompt {prompt:,}, answers to {longest:,}, {budget:,} a microbatch"
        )
        rows.append([f"{name}, {ranks} ranks", f"{computed:.3f}", f"{busiest:.3f}", f"{took:.3f}"])
        report.figures[f"{name}, {ranks} ranks: computed_over_unique"] = round(computed, 4)
        report.figures[f"{name}, {ranks} ranks: busiest_over_even"] = round(busiest, 4)
    report.print_table("plans", ["a step", "computed / unique", "busiest / even", "s"], rows)


def compare(report: Report, case: Case, repeats: int) -> dict[str, float]:
    """Measure both ways in turn; return the ratios of shared to dense."""
    runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            runs[way].append(in_a_process(_measured, case, way))
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
    speed = {way: tokens["tokens/dense"] / took[way] for way in WAYS}
    report.print_table(case.name, ["step", "forward, backward, update", "peak memory"], rows)
    for way in WAYS:
        report.figures[f"{case.name}: {way}_s"] = round(took[way], 3)
        report.figures[f"{case.name}: {way}_tokens_per_s"] = round(speed[way])
        report.figures[f"{case.name}: {way}_mib"] = round(extra[way] / MIB, 1)
    for name, value in tokens.items():
        report.figures[f"{case.name}: {name}"] = value
    for name, value in ratios.items():
        report.figures[f"{case.name}: {name}"] = round(value, 4)
    return ratios


def cases(quick: bool, long: bool) -> dict[str, Case]:
    """The groups; the ratios are those of `prompt`, and of `nothing` where nothing is shared."""
    if long:
        return {"prompt": Case("prompt of 32,768", 32_768, 256, hidden=64, layers=2)}
    size = 1024 if quick else 8192
    found = {"prompt": Case(f"prompt of {size:,}", size, 256)}
    if not quick:
        found["short"] = Case("prompt of 2,048", 2048, 256)
        found["late"] = Case("turns that branch after 6,144 of 8,192", 6144, 2048)
    found["nothing"] = Case("nothing shared", 0, 512 if quick else 2048)
    sites = f"four error sites in each of eight rollouts after {size:,}"
    found["teacher"] = Case(sites, size, 64 if quick else 256)
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", help="prompt, short, late, nothing, teacher, plans")
    parser.add_argument("--long", action="store_true", help="a prompt of 32,768 tokens alone")
    options = parser.parse_args()
    report = Report("prefix_tree")
    for name, case in cases(options.quick, options.long).items():
        if options.only and name not in options.only:
            continue
        if name == "teacher":
            report.ratios["teacher_time_over_dense"] = compare_teacher(report, case)
            continue
        ratios = compare(report, case, 3 if name == "nothing" else 1 + options.quick)
        if name == "prompt":
            report.ratios.update(ratios)
        if name == "nothing":
            report.ratios["time_over_dense_unshared"] = ratios["time_over_dense"]
    if not options.only or "plans" in options.only:
        compare_plans(report)
    if options.quick:
        report.figures["note"] = "a prompt of 1,024 shares less: its own bars are 0.5 and 0.6"
    report.finish(options.json)


if __name__ == "__main__":
    main()
