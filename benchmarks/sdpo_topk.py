"""Error of top-k teacher outputs against the full distribution, on rollouts of a run.

    python benchmarks/sdpo_topk.py RUN [--quick] [--json FILE]

Takes the newest checkpoint and the last rollouts with error sites of a finished run's directory,
shows the teacher their hints, and compares loss and gradient of each teacher output with those of
`hidden`, through the trainer's own channel. Trains nothing and starts no process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from report import Report, arguments
from torch import Tensor

from composer_mesh.actors.learning.sdpo_channel import SdpoChannel, StudentRows
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput, pack
from composer_mesh.actors.teacher_outputs.sources import asks_the_student
from composer_mesh.actors.teacher_outputs.teaching import TeacherModel
from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.reading import RunReader
from composer_mesh.tasks.loading import make_task

KEPT = (1, 4, 16, 64)
FULL, TOPK = "sdpo.teacher_output=full", "sdpo.teacher_output=topk"


@dataclass(frozen=True)
class Found:
    """Loss, gradient and size of one kind of teacher output."""

    loss: float
    gradient: Tensor
    bytes_per_token: float


class Sample:
    """A policy, and its own hinted rollouts."""

    def __init__(self, run: Path, sites: int) -> None:
        config = load_config(run / "config.toml")
        newest = max((run / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
        self.model: Any = load_model(newest)
        traces = rollouts(run)
        task = make_task(config)
        chat = ChatFormat(load_tokenizer(newest), task.tools)
        self.views: list[HintedView] = hinted_sites(
            traces, chat, attrgetter("answer"), sites, config.policy.max_context
        ).views
        wanted = {view.trace_id for view in self.views}
        self.traces = [trace for trace in traces if trace.trace_id in wanted]
        self._budget = config.trainer.microbatch_tokens

    @property
    def tokens(self) -> int:
        return sum(len(view.targets) for view in self.views)

    def measure(self, config: Config) -> Found:
        """Return loss and gradient of all weights with a config's teacher output."""
        model, channel = LanguageModel(self.model), SdpoChannel(config.sdpo, config.run.steps)
        places = {trace.trace_id: row for row, trace in enumerate(self.traces)}
        rows = StudentRows.of(
            model,
            model.hidden([trace.token_ids() for trace in self.traces]),
            [places[view.trace_id] for view in self.views],
            self.views,
            config.sdpo.temperature,
        )
        choice = rows.top_k(config.sdpo.top_k) if asks_the_student(config.sdpo) else None
        teacher = TeacherModel(self.model, config.sdpo, self._budget, follows=True)
        tensors = teacher.teacher_output(self.views, choice)
        loss = channel.loss(rows, TeacherOutput(tensors), self.tokens)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        return Found(loss.item(), flat, pack(tensors)[1].nbytes / self.tokens)


def rollouts(run: Path) -> list[Trace]:
    """Return the training rollouts of a run, the last ones first."""
    with RunReader(run) as reader:
        found = list(reader.all_traces())
    return [trace for trace in reversed(found) if trace.split == "train"]


def compare(report: Report, run: Path, sample: Sample) -> None:
    """Add a row per teacher output: its cost, and its error against `hidden`."""
    vocabulary = sample.model.config.vocab_size
    exact = measured(run, sample, ["sdpo.teacher_output=hidden"])
    full = measured(run, sample, [FULL])
    rows = [row("hidden", exact, exact), row("full", exact, full)]
    for choice in ("teacher", "student"):
        for kept in (*KEPT, vocabulary):
            overrides = [TOPK, f"sdpo.top_k={kept}", f"sdpo.top_k_choice={choice}"]
            found = measured(run, sample, overrides)
            name = f"topk {kept}, {choice}"
            rows.append(row(name, exact, found))
            report.figures[f"loss error, {name}"] = error(exact.loss, found.loss)
            report.figures[f"gradient error, {name}"] = distance(exact, found)
    report.ratios["full_gradient_error"] = distance(exact, full)
    report.ratios["whole_topk_gradient_error"] = distance(exact, found)
    title = f"{len(sample.views)} error sites, {sample.tokens} tokens, vocabulary {vocabulary}"
    columns = ["teacher_output", "bytes a token", "loss", "loss error", "gradient error"]
    report.print_table(title, columns, rows)


def measured(run: Path, sample: Sample, overrides: Sequence[str]) -> Found:
    return sample.measure(load_config(run / "config.toml", overrides))


def row(name: str, exact: Found, found: Found) -> list[str]:
    errors = (error(exact.loss, found.loss), distance(exact, found))
    return [
        name,
        f"{found.bytes_per_token:,.0f}",
        f"{found.loss:.6f}",
        *(f"{each:.1e}" if each else "0" for each in errors),
    ]


def error(exact: float, found: float) -> float:
    """Return the relative difference of losses."""
    return abs(found - exact) / abs(exact)


def distance(exact: Found, found: Found) -> float:
    """Return the norm of the gradients' difference over that of the exact gradient."""
    return float((found.gradient - exact.gradient).norm() / exact.gradient.norm())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a finished run")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report("sdpo_topk")
    compare(report, options.run, Sample(options.run, 8 if options.quick else 64))
    report.finish(options.json)


if __name__ == "__main__":
    main()
