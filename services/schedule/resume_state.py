"""What a run already has when its controller begins; one that starts has nothing of it.

Plain values: how they are read from a run directory is `resume_loader`.
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
    """A finished group; `worded` is None where nobody was asked for words."""

    traces: list[Trace]
    worded: WordedHints | None = None


@dataclass(frozen=True)
class ResumeState:
    """The first `steps` steps are done, and their version is what the trainer has.

    `past` are those of them that came after the checkpoint, to be trained once more; `planned` is
    the step after them where it was written down and not trained to its end. In `groups` are those
    that no step has taken.
    """

    steps: int = 0
    checkpoint: Checkpoint | None = None
    past: list[Trained] = field(default_factory=list)
    planned: PlannedStep | None = None
    groups: dict[int, StoredGroup] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
