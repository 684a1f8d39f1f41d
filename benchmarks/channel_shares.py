"""What it costs to measure each channel's share of an update: CPU time and memory of a step.

    python benchmarks/channel_shares.py [--quick] [--json FILE]

A step of eight rollouts, hinted error sites of half of them, and pairs. "together": all channels
are in one microbatch, with shared prefixes; "apart": pairs are in microbatches of their own. Each
way has a process of its own; the time is CPU time of one thread, the median of steps after the
first, and the memory what these add at most.
"""

import statistics
import time

import torch
from measuring import MIB, in_a_process, peak_bytes, reset_peak
from prefix_tree import Case, batch_of, config_of, model_of
from report import Report, arguments

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel

WAYS = {"one backward": 0, "measured": 1}
PLACES = {"together": "shared", "apart": "dense"}


def measured(case: Case, place: str, every: int, repeats: int) -> tuple[float, float]:
    """Return the median CPU seconds of steps, and the bytes that they add at most."""
    torch.set_num_threads(1)
    plain, model = config_of(case, PLACES[place]), model_of(case)
    trainer = plain.trainer.model_copy(update={"update_share_every": every})
    config = plain.model_copy(update={"trainer": trainer})
    step, sharing = OptimizerStep(model, None, config), config.trainer.sharing
    teacher = TeacherModel(model, config.sdpo, case.budget, follows=True, sharing=sharing)
    batch = batch_of(case)
    step.run(batch, InlineSource(teacher, config.sdpo, 0))
    before, took = reset_peak(), list[float]()
    for _ in range(repeats):
        began = time.process_time()
        step.run(batch, InlineSource(teacher, config.sdpo, 0))
        took.append(time.process_time() - began)
    return statistics.median(took), peak_bytes() - before


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report, repeats = Report("channel_shares"), 3 if options.quick else 7
    case = Case("prompt of 256", 256, 64 if options.quick else 256)
    for place in PLACES:
        found = {
            way: in_a_process(measured, case, place, every, repeats) for way, every in WAYS.items()
        }
        rows = [[way, f"{s:.2f} s", f"{m / MIB:,.0f} MiB"] for way, (s, m) in found.items()]
        report.print_table(f"channels {place}", ["step", "CPU time", "peak memory"], rows)
        for way, (seconds, memory) in found.items():
            report.figures[f"{place}, {way}: s"] = round(seconds, 3)
            report.figures[f"{place}, {way}: mib"] = round(memory / MIB, 1)
        for number, name in enumerate(("time", "memory")):
            ratio = found["measured"][number] / found["one backward"][number]
            report.ratios[f"{name}_over_one_backward_{place}"] = ratio
    report.finish(options.json)


if __name__ == "__main__":
    main()
