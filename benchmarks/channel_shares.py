"""What it costs to measure each channel's share of an update: CPU time and memory of a step.

    python benchmarks/channel_shares.py [--quick] [--json FILE]

A step of eight rollouts, hinted error sites of half of them, and pairs. "together": all channels
are in one microbatch, with shared prefixes; "apart": pairs are in microbatches of their own. Both
ways alternate, each in a process of its own; the time is CPU time of one thread.
"""

import multiprocessing
import statistics
import time

import torch
from prefix_tree import MIB, Case, _peak, _reset_peak, batch_of, config_of, model_of
from report import Report, arguments

from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel

WAYS = {"one backward": 0, "measured": 1}
PLACES = {"together": "shared", "apart": "dense"}


def measured(case: Case, place: str, every: int) -> tuple[float, float]:
    """Run one step in a process of its own; return its CPU seconds and its peak bytes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measured, (case, place, every))


def _measured(case: Case, place: str, every: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    plain, model = config_of(case, PLACES[place]), model_of(case)
    trainer = plain.trainer.model_copy(update={"update_share_every": every})
    config = plain.model_copy(update={"trainer": trainer})
    step, sharing = ThreeChannelStep(model, None, config), config.trainer.sharing
    teacher = TeacherModel(model, config.sdpo, case.budget, follows=True, sharing=sharing)
    batch, before = batch_of(case), _reset_peak("cpu")
    began = time.process_time()
    step.run(batch, InlineSource(teacher, config.sdpo, 0))
    return time.process_time() - began, _peak("cpu") - before


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report, repeats = Report("channel_shares"), 1 if options.quick else 3
    case = Case("prompt of 256", 256, 64 if options.quick else 256)
    for place in PLACES:
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way, every in WAYS.items():
                found[way].append(measured(case, place, every))
        seconds = {way: statistics.median(one[0] for one in found[way]) for way in WAYS}
        memory = {way: statistics.median(one[1] for one in found[way]) for way in WAYS}
        rows = [[way, f"{seconds[way]:.2f} s", f"{memory[way] / MIB:,.0f} MiB"] for way in WAYS]
        report.print_table(f"channels {place}", ["step", "CPU time", "peak memory"], rows)
        for way in WAYS:
            report.figures[f"{place}, {way}: s"] = round(seconds[way], 3)
            report.figures[f"{place}, {way}: mib"] = round(memory[way] / MIB, 1)
        for name, values in (("time", seconds), ("memory", memory)):
            ratio = values["measured"] / values["one backward"]
            report.ratios[f"{name}_over_one_backward_{place}"] = ratio
    report.finish(options.json)


if __name__ == "__main__":
    main()
