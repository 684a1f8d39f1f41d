"""The files of a launched job, in the folder `launch` of its run: names only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from composer_mesh.services.launch.orders import FOLDER, log_file


@dataclass(frozen=True)
class Places:
    """Where the job of one run finds and leaves things; all hosts see these files."""

    run: Path

    @property
    def folder(self) -> Path:
        """All of the others are in it."""
        return self.run / FOLDER

    @property
    def script(self) -> Path:
        """What sbatch is given."""
        return self.folder / "job.sbatch"

    @property
    def reach(self) -> Path:
        """What runs a command where the controller is."""
        return self.folder / "reach.sh"

    @property
    def log(self) -> Path:
        """What the controller prints, and what the job says about itself."""
        return log_file(self.run)

    @property
    def job(self) -> Path:
        """The id of the job that runs now, or ran last."""
        return self.folder / "slurm-job"

    @property
    def stopping(self) -> Path:
        """There while the run is to end for good: no job goes on with it."""
        return self.folder / "stopping"

    @property
    def queued_at(self) -> Path:
        """The step after which the job was last queued again."""
        return self.folder / "queued-again-at"
