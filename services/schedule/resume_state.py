"""State recovered on resume; empty for a new run.

Plain values; `resume_loader` reads them from a run directory.
"""

from dataclasses import dataclass, field

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.schedule.step_builder import PlannedStep
from composer_mesh.services.steps.hint_writing import WordedHints
from composer_mesh.services.steps.recomputation_check import Trained


@dataclass(frozen=True)
class StoredGroup:
    """A finished group; `worded` is None where no hint texts were requested."""

    traces: list[Trace]
    worded: WordedHints | None = None


@dataclass(frozen=True)
class ResumeState:
    """Progress recovered on resume: `steps` steps are done, and the trainer has their version.

    `past` are the done steps after the checkpoint, which are recomputed; `planned` is the next step
    where its manifest was written but its training did not finish. `groups` are the stored groups
    that no step has taken, and `next_group` is the first group, stored or not, that none has taken.
    """

    steps: int = 0
    checkpoint: Checkpoint | None = None
    past: list[Trained] = field(default_factory=list)
    planned: PlannedStep | None = None
    groups: dict[int, StoredGroup] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    next_group: int = 0
