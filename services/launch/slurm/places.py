"""Paths of a launched job's files, in the folder `launch` of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from composer_mesh.services.launch.orders import FOLDER, log_file


@dataclass(frozen=True)
class Places:
    """Paths of the files that a run's job reads and writes; all hosts share them."""

    run: Path

    @property
    def folder(self) -> Path:
        """The folder of all other files."""
        return self.run / FOLDER

    @property
    def script(self) -> Path:
        """The script for sbatch."""
        return self.folder / "job.sbatch"

    @property
    def log(self) -> Path:
        """The output of the controller and messages of the job."""
        return log_file(self.run)

    @property
    def job(self) -> Path:
        """The id of the current or last job."""
        return self.folder / "slurm-job"

    @property
    def stopping(self) -> Path:
        """Marker of a run that is being stopped for good: no job resumes it."""
        return self.folder / "stopping"

    @property
    def queued_at(self) -> Path:
        """The step after which the job was last queued again."""
        return self.folder / "queued-again-at"
