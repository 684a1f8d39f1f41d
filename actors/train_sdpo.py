"""The SDPO channel of a step: the student's rows of each view against the teacher's.

The teacher's hidden states are of the trainer's own version, so the trainer's head scores both.

Axes: N hinted response tokens, H hidden size.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from composer_mesh.actors.language_model import LanguageModel
from composer_mesh.configs.schema import Config, SdpoConfig
from composer_mesh.losses.distillation import TaidSchedule, entropy_gated_kl, taid_loss
from composer_mesh.losses.fused import linear_distillation, linear_jsd
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PolicySample

RowsByTrace = dict[str, list[tuple[HintedView, Tensor]]]


class SdpoChannel:
    """The configured distillation loss, and TAID's position between student and teacher."""

    def __init__(self, config: Config) -> None:
        self._config: SdpoConfig = config.sdpo
        self._steps = config.run.steps
        self.taid = TaidSchedule()

    def loss(
        self,
        model: LanguageModel,
        samples: Sequence[PolicySample],
        hidden: Tensor,
        views: RowsByTrace,
        normalizer: int,
    ) -> Tensor | None:
        """The loss of the samples' views, over all hinted tokens of the batch; None without any."""
        student, teacher = [], []
        for row, sample in enumerate(samples):
            for view, signal in views.get(sample.trace_id, []):
                student.append(hidden[row, view.student_rows])
                teacher.append(signal)
        if not student:
            return None
        return self._distil(model, torch.cat(student), torch.cat(teacher), normalizer)

    def finish_step(self, loss: float | None, step: int) -> dict[str, float]:
        """Move TAID's schedule after a step (0-based) that had this loss; its figures."""
        if self._config.wrapper != "taid" or loss is None:
            return {}
        used = self.taid.t
        self.taid.update(loss, step, self._steps)
        return {"sdpo/taid_t": used}

    def _distil(
        self, model: LanguageModel, student: Tensor, teacher: Tensor, normalizer: int
    ) -> Tensor:
        config, heads = self._config, {"student_bias": model.bias, "teacher_bias": model.bias}
        if config.wrapper == "none":
            return linear_jsd(
                student,
                model.weight,
                teacher,
                model.weight,
                beta=config.jsd_beta,
                temperature=config.temperature,
                normalizer=normalizer,
                **heads,
            )

        def rows_loss(own: Tensor, others: Tensor, _rows: slice) -> Tensor:
            mask = torch.ones(len(own), dtype=torch.bool, device=own.device)
            shared = {"temperature": config.temperature, "normalizer": normalizer}
            if config.wrapper == "taid":
                return taid_loss(own, others, mask, t=self.taid.t, **shared)
            return entropy_gated_kl(own, others, mask, h_max=config.entropy_opd_h_max, **shared)

        return linear_distillation(rows_loss, student, model.weight, teacher, model.weight, **heads)


def signals_by_trace(views: Sequence[HintedView], signal: Tensor | None) -> RowsByTrace:
    """Each view with its rows of the signal [N, H], by the trace that it belongs to."""
    found: RowsByTrace = defaultdict(list)
    if signal is not None:
        for view, rows in zip(views, _split(views, signal), strict=True):
            found[view.trace_id].append((view, rows))
    return found


def _split(views: Sequence[HintedView], signal: Tensor) -> Iterator[Tensor]:
    counts = [len(view.targets) for view in views]
    if sum(counts) != len(signal):
        raise ValueError(
            f"the signal has {len(signal)} rows but the views have {sum(counts)} tokens: build "
            "both from the same batch"
        )
    return iter(signal.split(counts))
