"""The trainer's real processes keep the contracts of their fakes (`unit/services/training`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import learning
from ranks_contract import CLAIMS
from training_contract import STEP_CLAIMS_OF_PROCESSES

from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.rank_processes import TrainerRanks
from composer_mesh.services.training.step import MeshTraining


class RankProcesses:
    """`TrainerRanks` with one rank, whose placement can be refused."""

    version = 0

    def __init__(self, host: MeshHost) -> None:
        self.refused: list[Exception] = []
        self.ranks = TrainerRanks(learning.config(), host, self._placement)

    def _placement(self, _rank: int) -> ProcessPlacement:
        if self.refused:
            raise self.refused.pop()
        return ProcessPlacement()

    def kill_one(self) -> None:
        os.kill(self.ranks.all[-1].pid, signal.SIGKILL)

    def fail_next_start(self, error: Exception) -> None:
        self.refused.append(error)


class StepProcess:
    """Steps on the ranks of `RankProcesses`."""

    def __init__(self, processes: RankProcesses) -> None:
        self._processes, self._ranks = processes, processes.ranks
        self.step = MeshTraining(learning.config(), lambda: self._ranks.all, None)

    async def version(self) -> int:
        return int((await self._ranks.first.call("describe", deadline_s=60.0))["policy_version"])

    async def serve(self) -> None:
        """The teacher in the trainer has its version."""

    async def restart_from(self) -> None:
        await self._ranks.restart_from(None)

    async def kill(self) -> None:
        self._processes.kill_one()
        await self._ranks.until_one_dies()


async def test_the_processes_of_a_trainer_keep_the_contracts_of_ranks_and_steps(
    host: MeshHost, tmp_path: Path
) -> None:
    learning.write_policy(tmp_path / "policy")
    harness = RankProcesses(host)
    await harness.ranks.start()
    await harness.ranks.load(tmp_path / "policy")
    for claim in CLAIMS:
        try:
            await claim(harness, tmp_path)
        except BaseException as error:
            error.add_note(f"while it was to be shown: {claim.__name__}")
            raise
    steps = StepProcess(harness)
    for of_steps in STEP_CLAIMS_OF_PROCESSES:
        await steps.restart_from()
        await of_steps(steps)
