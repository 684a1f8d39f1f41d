"""The trainer's processes, one per rank: starts, connects, loads and replaces them together."""

from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import Written
from composer_mesh.actors.trainer import TrainerActor
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.services.pool.process_placement import PlacementOf
from composer_mesh.services.pool.wait_for_capacity import LOOK_S
from composer_mesh.services.training.rank_processes import NEWS_S, RankProcesses

WARM_START_DEADLINE_S = 1800.0
WRITE_DEADLINE_S = 1800.0
"""Checkpoints are written concurrently with steps, so only a hung disk exceeds this."""


class TrainerRanks(RankProcesses):
    """The ranks of a run's trainer, which begin again from a checkpoint together."""

    def __init__(
        self,
        config: Config,
        host: MeshHost,
        placement: PlacementOf,
        look_s: float = LOOK_S,
        news_s: float = NEWS_S,
    ) -> None:
        super().__init__(TrainerActor, config, host, placement, look_s, news_s)
        self._folder: Path | None = None

    async def prepare(self) -> Path:
        """Return the folder of the initial policy. Waits for a warm start if none is cached."""
        folder: Path = await self.first.call(
            "prepare", self._config, deadline_s=WARM_START_DEADLINE_S
        )
        return folder

    async def load(self, folder: Path, checkpoint: Path | None = None) -> int:
        """Connect the ranks and load the initial policy, or a checkpoint of it.

        Returns the version that is loaded.
        """
        self._folder = folder
        await self.connect()
        wait_s = self._longest_wait_s
        versions: list[int] = await self.on_all(
            "load", self._config, folder, checkpoint, deadline_s=wait_s
        )
        return versions[0]

    async def save(self, draft: Path, export: bool) -> None:
        """Start writing a checkpoint to an absolute path. Waits until all states are copied."""
        await self.on_all("save", draft, export)

    async def saved(self) -> list[Written]:
        """Return the files of the started checkpoint. Waits until all ranks have written theirs."""
        written = await self.on_all("saved", deadline_s=WRITE_DEADLINE_S)
        return [one for files in written for one in files]

    async def begin_again(self, checkpoint: Path | None) -> int:
        """Replace all ranks with new processes, load a checkpoint and return its version.

        A single rank cannot be replaced, as the process group of the others is broken. If not all
        can start none is left running, and none of them counts as a death.
        """
        assert self._folder is not None, "ranks that never loaded have nothing to begin again from"
        await self.stop()
        await self.start()
        return await self.load(self._folder, checkpoint)
