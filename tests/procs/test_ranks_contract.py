"""The trainer's real processes keep the contract of its fakes (`unit/test_ranks_contract`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import learning
import pytest
from ranks_contract import CLAIMS

from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.ranks import TrainerRanks

pytestmark = pytest.mark.timeout(600)


class RankProcesses:
    """`TrainerRanks` with one rank; its seat can be refused."""

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


async def test_the_processes_of_a_trainer_keep_the_contract_of_ranks(
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
